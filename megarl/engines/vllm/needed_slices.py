"""Which boxes of the checkpoint's tensors a rank of an engine needs, found by letting vLLM's own loader run without memory.

The loader is given tensors on "meta": views of them keep their memory's identity, offset and strides, so that where it copies,
both ends are known exactly. It cuts for tensor parallel, fuses, and leaves other ranks' experts out as it always does; no
table of models is kept here. Where it does something else than copy, the tensor is told as whole: it has to go through the
loader again, with all others of the same layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, as_matrix

# In place, on parameters, and without a tensor of the checkpoint: vLLM clears the padding of vocabularies.
_CLEARS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def needs(model: torch.nn.Module, tensors: Iterable[tuple[str, Sequence[int], str]]) -> SliceTable:
    """Of the rank whose vLLM model this is, in checkpoint format and with its original weight loaders; parameters may be on
    "meta" and are not written to. `tensors`: names, shapes and types (torch's names) of all that the trainers hold.

    Raises ValueError where the loader needs a tensor's values.
    """
    trace = _Trace(model)
    given = []

    def without_memory() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype in tensors:
            given.append(name)
            yield name, trace.watch(name, torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta"))

    try:
        with trace:
            model.load_weights(without_memory())
    except KeyError as error:  # of most loaders, for a name that they look up in vain
        raise ValueError(f"vLLM's model knows no {error.args[0]!r}, which {given[-1]} is loaded into") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"vLLM's loader cannot be followed: at {given[-1] if given else 'its beginning'} it did what needs values ({error})"
        ) from error
    return trace.description()


@dataclass(frozen=True)
class _Copy:
    source: str
    box: tuple[int, int, int, int] | None  # None: it is none
    target: str
    offset: int
    stride: int


class _Trace(TorchDispatchMode):
    """Notes what is copied out of watched tensors into the model's."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}  # by memory; the tensor is kept, and so the memory
        self._made_of: dict[int, tuple[set[str], torch.Tensor]] = {}  # what operations made of watched tensors
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._targets.setdefault(_memory(tensor), (name, tensor))
        self._copies: list[_Copy] = []
        self._whole: set[str] = set()  # names of tensors, and of layers

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._sources[_memory(tensor)] = name, tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [
            x for x in torch.utils._pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(x, torch.Tensor)
        ]
        into = self._targets.get(_memory(leaves[0])) if leaves and func._schema.is_mutable else None
        made_of = {name for leaf in leaves for name in self._names(leaf)}
        if func is torch.ops.aten.copy_.default and into is not None and made_of:
            self._copy(args[0], args[1], into[0])
            return args[0]
        if into is not None and (made_of or func not in _CLEARS):
            self._whole |= made_of | {_layer(into[0])}
        result = func(*args, **(kwargs or {}))
        for out in _tensors([result]) if made_of else ():
            if not self._known(out):
                self._made_of.setdefault(_memory(out), (set(), out))[0].update(made_of)
        return result

    def _known(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._sources or _memory(tensor) in self._targets

    def _names(self, tensor: torch.Tensor) -> set[str]:
        memory = _memory(tensor)
        if memory in self._sources:
            return {self._sources[memory][0]}
        return self._made_of[memory][0] if memory in self._made_of else set()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        watched = self._sources.get(_memory(source))
        if watched is None:  # what was computed of watched tensors
            self._whole |= self._names(source) | {_layer(name)}
            return
        box, stride = _box(watched[1].shape, source, target)
        self._copies.append(_Copy(watched[0], box, name, target.storage_offset(), stride))

    def description(self) -> SliceTable:
        whole = self._closed()
        describer = SliceTableBuilder()
        shapes = {name: tensor for name, tensor in self._sources.values()}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._targets.values()}
        for name in shapes:  # in the checkpoint's order
            if name in whole:
                describer.add_whole(name, shapes[name].shape, str(shapes[name].dtype).removeprefix("torch."))
        for copy in self._copies:
            if copy.source not in whole:
                assert copy.box is not None
                tensor = describer.tensor(copy.source, shapes[copy.source].shape)
                parameter = describer.parameter(copy.target, dtypes[copy.target])
                describer.add(tensor, copy.box, parameter, copy.offset, copy.stride)
        return describer.build()

    def _closed(self) -> set[str]:
        """Names that have to go through the loader: with a tensor its layers, and with a layer its tensors."""
        whole = self._whole | {copy.source for copy in self._copies if copy.box is None}
        size = -1
        while size != len(whole):
            size = len(whole)
            for copy in self._copies:
                if copy.source in whole or _layer(copy.target) in whole:
                    whole |= {copy.source, _layer(copy.target)}
        return whole


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among an operator's arguments, or its results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layer(parameter: str) -> str:
    """The name of the module that has the parameter; no tensor of a checkpoint is called like one."""
    return f"layer {parameter.rpartition('.')[0]}"


def _box(
    shape: Sequence[int], source: torch.Tensor, target: torch.Tensor
) -> tuple[tuple[int, int, int, int] | None, int]:
    """Which box of a tensor of `shape` the view `source` is, as a matrix, and the elements between the beginnings of its
    rows in `target`."""
    width = as_matrix(shape)[1]
    row, column = divmod(source.storage_offset(), width) if width else (0, 0)
    if source.shape != target.shape:
        return None, 0
    dims = _joined(list(zip(source.shape, source.stride(), target.stride(), strict=True)))
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


def _joined(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(length, strides) of a view's dimensions, those that follow one another in both memories as one."""
    found: list[tuple[int, int, int]] = []
    for length, *strides in (dim for dim in dims if dim[0] != 1):
        if found and all(outer == length * inner for outer, inner in zip(found[-1][1:], strides, strict=True)):
            length *= found.pop()[0]
        found.append((length, strides[0], strides[1]))
    return found
