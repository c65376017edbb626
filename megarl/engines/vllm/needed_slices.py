"""Slices of the checkpoint's tensors that an engine rank needs, traced by running vLLM's loader on meta tensors.

Views of meta tensors keep the identity of their storage, their offset and strides, so every copy of the loader shows
exactly which slice goes where. The loader shards for tensor parallelism, fuses tensors and skips other ranks' experts as
usual, so no table of models is needed. A tensor that the loader does more with than copying is marked as whole: it goes
through the loader in every update, with all other tensors of the same layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, as_matrix

_TEXT_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
# In-place operators on parameters without a tensor of the checkpoint: vLLM clears vocabulary padding with them.
_CLEARS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def needed_slices(model: torch.nn.Module, tensors: Iterable[tuple[str, Sequence[int], str]]) -> SliceTable:
    """Return the slices that a rank's vLLM model needs.

    `model`: in checkpoint format with its original weight loaders; its parameters may be on "meta" and are not written.
    `tensors`: (name, shape, torch dtype name) of all tensors that the trainers hold. Raises ValueError if the loader needs
    a tensor's values or a parameter that the model lacks.
    """
    trace = _Trace(model)
    loaded = []

    def meta_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype in tensors:
            loaded.append(name)
            yield name, trace.watch(name, torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta"))

    try:
        with trace:
            model.load_weights(meta_tensors())
    except KeyError as error:  # most loaders look up parameters by name
        use = f"into which {loaded[-1]} is loaded" if loaded else "which its loader looks up at its start"
        raise ValueError(f"vLLM's model has no parameter {error.args[0]!r}, {use}") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"vLLM's loader cannot be traced: at {loaded[-1] if loaded else 'its start'} it needs tensor values ({error})"
        ) from error
    return trace.slice_table()


@dataclass(frozen=True)
class _Copy:
    source: str
    slice: tuple[int, int, int, int] | None  # (row, column, rows, columns); None: not a rectangular slice
    target: str
    offset: int  # of the slice's first element in the target's storage, in elements
    stride: int  # between the slice's rows in the target's storage, in elements


class _Trace(TorchDispatchMode):
    """Records copies from watched tensors into the model's parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}  # by storage; keeps the tensor and so the storage alive
        self._derived: dict[int, tuple[set[str], torch.Tensor]] = {}  # by storage: computed from the sources named
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._targets.setdefault(storage_id(tensor), (name, tensor))
        self._copies: list[_Copy] = []
        self._whole: set[str] = set()  # names of tensors and of layers

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._sources[storage_id(tensor)] = name, tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [
            x for x in torch.utils._pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(x, torch.Tensor)
        ]
        target = self._targets.get(storage_id(leaves[0])) if leaves and func._schema.is_mutable else None
        sources = {name for leaf in leaves for name in self._source_names(leaf)}
        if func is torch.ops.aten.copy_.default and target is not None and sources:
            self._copy(args[0], args[1], target[0])
            return args[0]
        if leaves and func._schema.is_mutable and storage_id(leaves[0]) in self._sources:
            self._whole |= self._source_names(leaves[0])  # the loader changes the tensor before it copies it
        if target is not None and (sources or func not in _CLEARS):
            self._whole |= sources | {_layer(target[0])}
        result = func(*args, **(kwargs or {}))
        for out in _tensors([result]) if sources else ():
            if storage_id(out) not in self._sources and storage_id(out) not in self._targets:
                self._derived.setdefault(storage_id(out), (set(), out))[0].update(sources)
        return result

    def _source_names(self, tensor: torch.Tensor) -> set[str]:
        storage = storage_id(tensor)
        if storage in self._sources:
            return {self._sources[storage][0]}
        return self._derived[storage][0] if storage in self._derived else set()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        watched = self._sources.get(storage_id(source))
        if watched is None:  # computed from watched tensors
            self._whole |= self._source_names(source) | {_layer(name)}
            return
        copied, stride = _slice_of(watched[1].shape, source, target)
        self._copies.append(_Copy(watched[0], copied, name, target.storage_offset(), stride))

    def slice_table(self) -> SliceTable:
        whole = self._whole_names()
        table = SliceTableBuilder()
        watched = {name: tensor for name, tensor in self._sources.values()}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._targets.values()}
        for name, tensor in watched.items():  # in the checkpoint's order
            if name in whole:
                table.add_whole(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        for copy in self._copies:
            if copy.source not in whole:
                assert copy.slice is not None
                source = table.tensor(copy.source, watched[copy.source].shape)
                parameter = table.parameter(copy.target, dtypes[copy.target])
                table.add(source, copy.slice, parameter, copy.offset, copy.stride)
        return table.build()

    def _whole_names(self) -> set[str]:
        """Return the tensors and layers that go through the loader: all layers of such a tensor, all tensors of such a
        layer."""
        whole = self._whole | {copy.source for copy in self._copies if copy.slice is None}
        size = -1
        while size != len(whole):
            size = len(whole)
            for copy in self._copies:
                if copy.source in whole or _layer(copy.target) in whole:
                    whole |= {copy.source, _layer(copy.target)}
        return whole


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in an operator's results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which views share."""
    return tensor.untyped_storage()._cdata


def _layer(parameter: str) -> str:
    """Return the key of the parameter's module, with a prefix that no tensor name has."""
    return f"layer {parameter.rpartition('.')[0]}"


def _slice_of(
    shape: Sequence[int], source: torch.Tensor, target: torch.Tensor
) -> tuple[tuple[int, int, int, int] | None, int]:
    """Return the slice (row, column, rows, columns) that the view `source` is of a tensor of `shape`, taken as a matrix, and
    the row stride in `target`, in elements. None if the view is not a rectangular slice."""
    width = as_matrix(shape)[1]
    row, column = divmod(source.storage_offset(), width) if width else (0, 0)
    if source.shape != target.shape:
        return None, 0
    dims = _merge_dims(list(zip(source.shape, source.stride(), target.stride(), strict=True)))
    if len(dims) < 2 and (not dims or dims[0][1:] == (1, 1)):
        count = dims[0][0] if dims else 1
        if column + count <= width:
            return (row, column, 1, count), count
        return ((row, 0, count // width, width), width) if column == 0 and count % width == 0 else (None, 0)
    if len(dims) == 1 and dims[0][1] == width:
        return (row, column, dims[0][0], 1), dims[0][2]
    if len(dims) == 2 and dims[0][1] == width and dims[1][1:] == (1, 1) and column + dims[1][0] <= width:
        return (row, column, dims[0][0], dims[1][0]), dims[0][2]
    return None, 0


def _merge_dims(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge dimensions (length, source stride, target stride) that are contiguous in both tensors."""
    merged: list[tuple[int, int, int]] = []
    for length, *strides in (dim for dim in dims if dim[0] != 1):
        if merged and all(outer == length * inner for outer, inner in zip(merged[-1][1:], strides, strict=True)):
            length *= merged.pop()[0]
        merged.append((length, strides[0], strides[1]))
    return merged


def is_unused(name: str, config: Any) -> bool:
    """Return True for exported tensors that an engine never reads: multi-token-prediction layers after the last layer, and
    an output layer that shares the embedding's weights."""
    layer = _TEXT_LAYER.match(name)
    if layer is not None and int(layer[1]) >= config.num_hidden_layers:
        return True
    return bool(getattr(config, "tie_word_embeddings", False)) and name.endswith("lm_head.weight")
