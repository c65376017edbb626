"""A Hugging Face directory from the trained weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_SHARD_BYTES = 4 * 2**30
_INDEX = "model.safetensors.index.json"


def save_hf(directory: Path, source: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write `weights` (Hugging Face names) with what else `source` has into `directory`, on rank 0.

    Every rank calls it, since the weights come out of collectives. Configuration and tokenizer files are
    copied, and so are tensors of `source` that were not trained (multi-token-prediction layers): an engine
    wants the keys that the original has.
    """
    rank = torch.distributed.get_rank()
    if rank != 0:
        for _ in weights:
            pass
        torch.distributed.barrier()
        return
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".pt", ".pth", _INDEX)):
            shutil.copy2(file, directory / file.name)
    _Shards(directory).write(_with_untrained(weights, source))
    torch.distributed.barrier()


def _with_untrained(weights: Iterator[tuple[str, torch.Tensor]], source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, then the tensors of `source` that were not among them. A tied copy that the original
    does not have is left out."""
    files = _tensor_files(source)
    for name, tensor in weights:
        if name in files:
            del files[name]
            yield name, tensor.detach().cpu().contiguous()
    for name, file in files.items():
        with safe_open(file, framework="pt", device="cpu") as reader:
            yield name, reader.get_tensor(name)


class _Shards:
    """Writes tensors into safetensors files of bounded size, with the index that names them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: list[list[str]] = []
        self.total = 0

    def write(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        pending: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in weights:
            if pending and size + tensor.nbytes > _SHARD_BYTES:
                self._flush(pending)
                pending, size = {}, 0
            pending[name] = tensor.clone()  # exported tensors may share memory, which safetensors refuses
            size += tensor.nbytes
        self._flush(pending)
        self._name()

    def _flush(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.directory / f"part-{len(self.files)}.safetensors", metadata={"format": "pt"})
        self.files.append(list(tensors))
        self.total += sum(tensor.nbytes for tensor in tensors.values())

    def _name(self) -> None:
        """Final names say how many files there are, which is known only now."""
        if len(self.files) == 1:
            (self.directory / "part-0.safetensors").rename(self.directory / "model.safetensors")
            return
        places = {}
        for i, names in enumerate(self.files):
            file = f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors"
            (self.directory / f"part-{i}.safetensors").rename(self.directory / file)
            places.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self.directory / _INDEX).write_text(json.dumps(index, indent=2))


def compare_with_hf(directory: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path) -> int:
    """Read `directory` back and hold it to `weights`, tensor by tensor, and to the key set of `source`.

    Every rank calls it (the weights come out of collectives); rank 0 compares. Returns the number of
    tensors in the directory (0 on other ranks). Raises RuntimeError for the first that differs.
    """
    if torch.distributed.get_rank() != 0:
        for _ in weights:
            pass
        return 0
    written, original = _tensor_files(directory), _tensor_files(source)
    if set(written) != set(original):
        odd = sorted(set(written) ^ set(original))
        raise RuntimeError(f"{directory} and {source} do not hold the same tensors; they differ in {odd[:3]}")
    for name, tensor in weights:
        if name not in written:
            continue  # a tied copy, which the original does not have either
        with safe_open(written[name], framework="pt", device="cpu") as reader:
            if not torch.equal(reader.get_tensor(name), tensor.detach().cpu()):
                raise RuntimeError(f"{name} in {directory} is not what the trainer holds: the export is damaged")
    return len(written)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor."""
    files = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as reader:
            files.update(dict.fromkeys(reader.keys(), file))
    return files
