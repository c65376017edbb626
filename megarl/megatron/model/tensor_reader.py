"""Read slices of the tensors of a Hugging Face directory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.hf.families.slices import as_matrix
from megarl.hf.weights import read_index


class TensorReader(contextlib.ExitStack):
    """The safetensors files of a directory, which are open until the context ends."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises ValueError if there are none."""
        super().__init__()
        self._directory = directory
        self._files: dict[str, Any] = {}  # by tensor
        files = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
        placed = read_index(directory, files)
        for name in dict.fromkeys(placed.values()) or files:  # a repository may also hold files that the index lacks
            handle = self.enter_context(safe_open(files[name], framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(handle.keys(), handle))
        if not self._files:
            raise ValueError(f"{directory} holds no *.safetensors")

    def check_shape(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the directory has no `tensor`, or one of another shape."""
        if tensor not in self._files:
            raise ValueError(f"{self._directory} has no tensor {tensor}, which its config.json asks for")
        stored = tuple(self._files[tensor].get_slice(tensor).get_shape())
        if stored != shape:
            raise ValueError(
                f"{tensor} has shape {list(stored)} in {self._directory}; by its config.json it would be {list(shape)}"
            )

    def matrix(self, tensor: str, row: int, column: int, rows: int, columns: int) -> torch.Tensor:
        """Return [rows, columns] of a tensor as a matrix (see `as_matrix`), from `row` and `column`."""
        stored = self._files[tensor].get_slice(tensor)
        shape = stored.get_shape()
        if len(shape) == 1:
            return stored[column : column + columns].view(1, columns)
        if len(shape) == 2:
            return stored[row : row + rows, column : column + columns]
        lines = stored[row : row + rows]
        return lines.reshape(rows, as_matrix(shape)[1])[:, column : column + columns]
