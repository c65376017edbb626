"""Slices of a directory's tensors, and messages for directories that do not fit their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.megatron.model.tensor_reader import TensorReader

TENSORS = {
    "vector": torch.arange(6.0),
    "matrix": torch.arange(12.0).view(3, 4),
    "stack": torch.arange(24.0).view(2, 3, 4),
}


def test_slices_of_vectors_matrices_and_stacks(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        assert torch.equal(reader.matrix("vector", 0, 2, 1, 3), TENSORS["vector"][None, 2:5])
        assert torch.equal(reader.matrix("matrix", 1, 1, 2, 2), TENSORS["matrix"][1:3, 1:3])
        assert torch.equal(reader.matrix("stack", 1, 4, 1, 8), TENSORS["stack"].view(2, 12)[1:, 4:])


def test_files_beside_the_index_are_not_read(tmp_path: Path) -> None:
    """Mistral's repositories hold the weights a second time, under other names."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with TensorReader(tmp_path) as reader:
        reader.check_shape("a", (2,))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        TensorReader(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        with pytest.raises(ValueError, match=r"has no tensor bias, which its config\.json asks for"):
            reader.check_shape("bias", (6,))
        with pytest.raises(
            ValueError, match=r"matrix has shape \[3, 4\] in .*; by its config.json it would be \[4, 4\]"
        ):
            reader.check_shape("matrix", (4, 4))
