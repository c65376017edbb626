"""A Hugging Face directory from the trained weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.atomic_files import give_default_mode, written_whole
from megarl.hf.weights import CONVERSION

_SHARD_BYTES = 4 * 2**30
_SHOWN = 5  # names in an error
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Change:
    """In which tensors a trained model differs from the directory it came from, and how its config.json."""

    without: tuple[str, ...] = ()  # the directory may have them, the model has not
    beyond: tuple[str, ...] = ()  # the model has them, the directory need not
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # what becomes of config.json

    def apply(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*(name for name in names if name not in self.without), *self.beyond]))


def save_hf(
    directory: Path, source: Path, weights: Iterator[tuple[str, torch.Tensor]], change: Change = Change()
) -> None:
    """Write `weights` (Hugging Face names) with what else `source` has into `directory`, on rank 0.

    Every rank calls it, since the weights come out of collectives. Configuration and tokenizer files are
    copied, and so are tensors of `source` that are never trained (multi-token-prediction layers): an engine
    wants the keys that the original has. Raises RuntimeError where any other tensor of `source` is not among
    `weights`: the directory would mix trained weights with old ones. `change`: where the model is another.

    `directory` is there when it is whole and on the disk, and takes the place of an earlier one; see
    `durable.written_whole`.
    """
    rank = torch.distributed.get_rank()
    if rank != 0:
        for _ in weights:
            pass
        torch.distributed.barrier()
        return
    with written_whole(directory) as partial:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".pt", ".pth", _INDEX, CONVERSION)):
                shutil.copyfile(file, partial / file.name)
        if change.config is not None:
            (partial / "config.json").write_text(json.dumps(change.config(_config(source)), indent=2) + "\n")
        _Shards(partial).write(_with_untrained(weights, source, change))
    torch.distributed.barrier()


def _with_untrained(
    weights: Iterator[tuple[str, torch.Tensor]], source: Path, change: Change
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, then the untrained tensors of `source`. What the original does not have is left out."""
    files = _tensor_files(source)
    untrained = _untrained(files, source)
    missing = dict.fromkeys(name for name in change.apply(files) if name not in untrained)
    for name, tensor in _with_tied(weights, source):
        if name in missing:
            del missing[name]
            yield name, tensor.detach().cpu().contiguous()
    if missing:
        raise RuntimeError(
            f"{len(missing)} tensors of {source} are not among the exported weights: {_some(missing)}. Nothing was "
            "put in their place: the export is not complete and not usable"
        )
    for name in untrained:
        with safe_open(files[name], framework="pt", device="cpu") as reader:
            yield name, reader.get_tensor(name)


def _with_tied(weights: Iterator[tuple[str, torch.Tensor]], source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, the output layer included where it is the embedding: some models hold it twice all the same.

    Megatron has it once, or, with several pipeline stages, on the last one too: a name may come twice.
    """
    tied = _config(source).get("tie_word_embeddings", False)
    for name, tensor in weights:
        yield name, tensor
        if tied and name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


def _config(source: Path) -> dict[str, Any]:
    return json.loads((source / "config.json").read_text())


def _untrained(names: Iterable[str], source: Path) -> list[str]:
    """Those of `names` that belong to multi-token-prediction layers, which lie behind the model's last layer."""
    config = _config(source)
    if not config.get("num_nextn_predict_layers"):
        return []
    extra = range(config["num_hidden_layers"], config["num_hidden_layers"] + config["num_nextn_predict_layers"])
    prefixes = tuple(f"model.layers.{number}." for number in extra)
    return [name for name in names if name.startswith(prefixes)]


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")


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
        path = self.directory / f"part-{len(self.files)}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        give_default_mode(path)
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


class Comparison(NamedTuple):
    """How many tensors of an exported directory are what."""

    equal: int  # bit for bit what the trainer holds
    untrained: int  # multi-token-prediction layers: bit for bit the original model's


def compare_with_hf(
    directory: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path, change: Change = Change()
) -> Comparison:
    """Read `directory` back and hold every tensor in it to `weights`, or to `source` where it is untrained.

    Every rank calls it (the weights come out of collectives); rank 0 compares, others return zeros. Raises
    RuntimeError where a tensor differs, is missing or has nothing to be compared with.
    """
    if torch.distributed.get_rank() != 0:
        for _ in weights:
            pass
        return Comparison(0, 0)
    written, original = _tensor_files(directory), _tensor_files(source)
    if odd := set(written) ^ set(change.apply(original)):
        raise RuntimeError(f"{directory} and {source} do not hold the same tensors; they differ in {_some(odd)}")
    untrained = _untrained(written, source)
    left = set(written) - set(untrained)
    for name, tensor in _with_tied(weights, source):
        if name in left:  # else a tied copy, which the original does not have either
            left.remove(name)
            _check_equal(name, written[name], tensor.detach().cpu(), "what the trainer holds")
    if left:
        raise RuntimeError(
            f"the trainer holds nothing to compare {len(left)} tensors of {directory} with: {_some(left)}"
        )
    for name in untrained:
        with safe_open(original[name], framework="pt", device="cpu") as reader:
            _check_equal(name, written[name], reader.get_tensor(name), "what the original model has")
    return Comparison(len(written) - len(untrained), len(untrained))


def _check_equal(name: str, file: Path, expected: torch.Tensor, what: str) -> None:
    with safe_open(file, framework="pt", device="cpu") as reader:
        tensor = reader.get_tensor(name)
    if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
        raise RuntimeError(f"{name} in {file} is not {what}: the export is damaged")


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor."""
    files = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as reader:
            files.update(dict.fromkeys(reader.keys(), file))
    return files
