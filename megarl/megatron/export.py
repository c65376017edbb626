"""Write trained weights as a Hugging Face directory, and verify a written directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.atomic_files import atomic_directory, give_default_mode
from megarl.hf.config import text_fields
from megarl.hf.families import FAMILIES
from megarl.hf.weights import CONVERSION, read_index

T = TypeVar("T")

_SHARD_BYTES = 4 * 2**30
_SHOWN = 5  # names in an error
_INDEX = "model.safetensors.index.json"
_FREQUENCIES = ".rotary_emb.inv_freq"  # a buffer, which published weights of Moonlight and Kimi-K2 hold once per layer
_TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer with several templates
_TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    _TEMPLATES,
)


@dataclass(frozen=True)
class ExportChange:
    """Differences of a trained model from its source directory: tensor names, config.json, tokenizer and chat template."""

    removed: tuple[str, ...] = ()  # tensors that the source may have and the model does not
    added: tuple[str, ...] = ()  # tensors that the model has and the source may lack
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # transforms config.json
    tokenizer: Path | None = None  # folder of a tokenizer instead of the source's
    chat_template: str | None = None  # text of a template instead of the tokenizer's

    def apply(self, names: Iterable[str]) -> list[str]:
        """Return the model's tensor names from the source's."""
        return list(dict.fromkeys([*(name for name in names if name not in self.removed), *self.added]))


def without_gradients(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each computed without gradients, and leave the caller's gradient mode as it is.

    A generator that is suspended within `torch.no_grad()` would disable gradients for its caller, and for good if two of them end
    in the order in which they began.
    """
    iterator = iter(items)
    while True:
        with torch.no_grad():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def save_hf(
    directory: Path,
    source: Path,
    weights: Iterator[tuple[str, torch.Tensor]],
    change: ExportChange = ExportChange(),
) -> None:
    """Write `weights` (Hugging Face names) and the other files of `source` to `directory`, on rank 0.

    Collective, since iterating the weights runs collectives. Configuration and tokenizer files are copied, and so are
    tensors of `source` that are never trained (see `_untrained`): engines expect all keys of the original.
    Raises RuntimeError if any other tensor of `source` is missing from `weights`, instead of mixing trained and old
    weights. `change`: for a model that differs from `source`.

    `directory` replaces an earlier one atomically, after a sync; see `atomic_files.atomic_directory`.
    """
    rank = torch.distributed.get_rank()
    if rank != 0:
        for _ in weights:
            pass
        torch.distributed.barrier()
        return
    with atomic_directory(directory) as partial:
        weight_files = (".safetensors", ".bin", ".pt", ".pth", _INDEX, CONVERSION)
        _copy((file for file in source.iterdir() if not file.name.endswith(weight_files)), partial)
        if change.tokenizer is not None:
            _replace_tokenizer(partial, change.tokenizer)
        if change.config is not None:
            (partial / "config.json").write_text(json.dumps(change.config(_config(source)), indent=2) + "\n")
        if change.chat_template is not None:
            _write_chat_template(partial, change.chat_template)
        _Shards(partial).write(_with_untrained(weights, source, change))
    torch.distributed.barrier()


def _copy(paths: Iterable[Path], directory: Path) -> None:
    """Copy files, and a tokenizer's folder of templates, to `directory`. Other folders are left out."""
    for path in sorted(paths):
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
        elif path.name == _TEMPLATES:
            shutil.copytree(path, directory / path.name, copy_function=shutil.copyfile)


def _replace_tokenizer(directory: Path, tokenizer: Path) -> None:
    """Delete the tokenizer's files in `directory`, and copy those of the folder `tokenizer` there."""

    def files(folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if any(path.match(pattern) for pattern in _TOKENIZER_FILES)]

    for path in files(directory):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _copy(files(tokenizer), directory)


def _write_chat_template(directory: Path, template: str) -> None:
    """Replace the chat template of the tokenizer in `directory`, in all places where transformers looks for one."""
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "chat_template.json").unlink(missing_ok=True)
    settings = directory / "tokenizer_config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        if content.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_untrained(
    weights: Iterator[tuple[str, torch.Tensor]], source: Path, change: ExportChange
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights`, then the untrained tensors of `source`. Tensors that `source` does not have are skipped."""
    files = _tensor_files(source)
    untrained = _untrained(files, source)
    missing = dict.fromkeys(name for name in change.apply(files) if name not in untrained)
    for name, tensor in _with_tied(weights, source):
        if name in missing:
            del missing[name]
            yield name, tensor.detach().cpu().contiguous()
    if missing:
        raise RuntimeError(
            f"{len(missing)} tensors of {source} are not among the exported weights: {_some(missing)}. The export is "
            "incomplete and not usable"
        )
    for name in untrained:
        with safe_open(files[name], framework="pt", device="cpu") as reader:
            yield name, reader.get_tensor(name)


def _with_tied(weights: Iterator[tuple[str, torch.Tensor]], source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights`, adding the output layer if it is tied to the embedding: some source directories store both.

    Megatron has the embedding once, or also on the last pipeline stage: a name may come twice.
    """
    tied = text_fields(_config(source)).get("tie_word_embeddings", False)
    for name, tensor in weights:
        yield name, tensor
        if tied and name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", tensor


def _config(source: Path) -> dict[str, Any]:
    return json.loads((source / "config.json").read_text())


def _untrained(names: Iterable[str], source: Path) -> list[str]:
    """Return the `names` that are not trained: multi-token-prediction layers, which follow the last layer, `carried` ones and
    stored rotary frequencies, which follow from config.json."""
    config = _config(source)
    family = FAMILIES.get(config.get("model_type", ""))
    carried = family.carried if family else ()
    if count := config.get("num_nextn_predict_layers"):
        first = config["num_hidden_layers"]
        carried += tuple(f"model.layers.{number}." for number in range(first, first + count))
    return [name for name in names if name.startswith(carried) or name.endswith(_FREQUENCIES)]


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")


class _Shards:
    """Write tensors into safetensors files of bounded size, with an index."""

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
            pending[name] = tensor.clone()  # exported tensors may share memory, which safetensors rejects
            size += tensor.nbytes
        self._flush(pending)
        self._rename()

    def _flush(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self.directory / f"part-{len(self.files)}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        give_default_mode(path)
        self.files.append(list(tensors))
        self.total += sum(tensor.nbytes for tensor in tensors.values())

    def _rename(self) -> None:
        """Give the files their final names, which contain the number of files."""
        if len(self.files) == 1:
            (self.directory / "part-0.safetensors").rename(self.directory / "model.safetensors")
            return
        file_of_tensor = {}
        for i, names in enumerate(self.files):
            file = f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors"
            (self.directory / f"part-{i}.safetensors").rename(self.directory / file)
            file_of_tensor.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total}, "weight_map": file_of_tensor}
        (self.directory / _INDEX).write_text(json.dumps(index, indent=2))


class ExportComparison(NamedTuple):
    """Numbers of tensors in a verified export."""

    equal: int  # bit-identical to the trainer's weights
    untrained: int  # see `_untrained`; bit-identical to the source model


def compare_with_hf(
    directory: Path,
    weights: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    change: ExportChange = ExportChange(),
) -> ExportComparison:
    """Read `directory` back and compare every tensor with `weights`, or with `source` if it is untrained.

    Collective, since iterating the weights runs collectives; rank 0 compares, other ranks return zeros. Raises
    RuntimeError if a tensor differs, is missing, or has no counterpart.
    """
    if torch.distributed.get_rank() != 0:
        for _ in weights:
            pass
        return ExportComparison(0, 0)
    written, original = _tensor_files(directory), _tensor_files(source)
    if odd := set(written) ^ set(change.apply(original)):
        raise RuntimeError(f"{directory} and {source} do not hold the same tensors; they differ in {_some(odd)}")
    untrained = _untrained(written, source)
    left = set(written) - set(untrained)
    for name, tensor in _with_tied(weights, source):
        if name in left:  # else a tied copy that the source does not have either
            left.remove(name)
            _check_equal(name, written[name], tensor.detach().cpu(), "the trainer's weight")
    if left:
        raise RuntimeError(
            f"the trainer has no weights to compare with {len(left)} tensors of {directory}: {_some(left)}"
        )
    for name in untrained:
        with safe_open(original[name], framework="pt", device="cpu") as reader:
            _check_equal(name, written[name], reader.get_tensor(name), "the original model's")
    return ExportComparison(len(written) - len(untrained), len(untrained))


def _check_equal(name: str, file: Path, expected: torch.Tensor, origin: str) -> None:
    with safe_open(file, framework="pt", device="cpu") as reader:
        tensor = reader.get_tensor(name)
    if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
        raise RuntimeError(f"{name} in {file} is not {origin}: the export is damaged")


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor name to the safetensors file that holds it."""
    by_name = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    if placed := read_index(directory, by_name):
        return {name: by_name[file] for name, file in placed.items()}
    files = {}
    for file in by_name.values():
        with safe_open(file, framework="pt", device="cpu") as reader:
            files.update(dict.fromkeys(reader.keys(), file))
    return files
