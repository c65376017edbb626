"""Which boxes of the checkpoint's tensors this rank's parameters are: found by sending places through mbridge's own export.

mbridge joins the parts of all tensor-parallel ranks and cuts the whole into the checkpoint's tensors. Sent through the same
two methods, numbers of rows, of columns and of ranks come out where the elements do. Nothing is communicated, and kinds of
parameters are tried once each. So no table of models is kept here: what mbridge can export, this describes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from megarl.megatron.model import Model
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, as_matrix

_EXPERTS = ".mlp.experts.linear_fc"


def holdings(model: Model) -> SliceTable:
    """Of this rank. Parameters are called as `parameters` calls them.

    Raises ValueError where mbridge makes something else of a parameter than boxes: no plan can be made for the model.
    """
    return describe(model.bridge, model.lora.base() if model.lora else model.chunks)


def parameters(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """What `holdings` describes, as it is now: with what adapters add, which is computed anew for each."""
    for number, chunk in enumerate(model.merged_chunks):
        for name, weight in _weights(chunk):
            yield f"{number}/{name}", weight


def describe(bridge: Any, chunks: Sequence[Any], forms: Forms | None = None) -> SliceTable:
    """`holdings` of the rank that `bridge.mpu` says, whose chunks have the shapes of `chunks`. `forms`: of the same bridge, for
    one rank after the other."""
    from mbridge.core.util import unwrap_model

    describer, forms = SliceTableBuilder(), forms or Forms(bridge)
    for number, chunk in enumerate(map(unwrap_model, chunks)):
        global_names = bridge._weight_name_mapping_mcore_local_to_global(chunk)
        for name, weight in _weights(chunk):
            parameter = describer.parameter(f"{number}/{name}", str(weight.dtype).removeprefix("torch."))
            stride = as_matrix(weight.shape)[1]
            for tensor, form in forms.of(global_names[name], weight):
                place = describer.tensor(tensor, form.shape)
                for row, column, rows, columns, at_row, at_column in form.boxes:
                    describer.add(place, (row, column, rows, columns), parameter, at_row * stride + at_column, stride)
    return describer.build()


def _weights(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What mbridge exports: parameters, and the routers' biases, which are buffers."""
    from mbridge.core.util import unwrap_model

    chunk = unwrap_model(chunk)
    names = set()
    for name, weight in chunk.named_parameters():
        names.add(name)
        yield name, weight
    for name, value in chunk.state_dict().items():
        if "expert_bias" in name and "_extra_state" not in name and name not in names:
            yield name, value


@dataclass(frozen=True)
class _Form:
    """One tensor that mbridge makes of a kind of parameter, and what of it a rank's own parameter is."""

    shape: tuple[int, ...]
    boxes: list[tuple[int, int, int, int, int, int]]  # row, column, rows, columns; the parameter's row and column


class Forms:
    """What mbridge makes of parameters, by kind: layers and experts differ by their numbers alone, and so do ranks of which
    none has a part of the others' parameter."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._known: dict[tuple[Any, ...], list[_Form]] = {}

    def of(self, name: str, weight: torch.Tensor) -> list[tuple[str, _Form]]:
        """`name`: Megatron's, its layer and expert counted over the whole model."""
        key = (re.sub(r"\d+", "#", name), weight.shape, *_shards(self._bridge, name, weight))
        names = self._bridge._weight_name_mapping_mcore_to_hf(name)
        forms = self._known.get(key)
        if forms is None or len(forms) != len(names):
            names, forms = _try(self._bridge, name, weight)
            self._known[key] = forms
        return list(zip(names, forms, strict=True))


def _shards(bridge: Any, name: str, weight: torch.Tensor) -> tuple[int, int]:
    """Parts that mbridge joins, and which of them is this rank's; 1 and 0: the parameter is whole on each rank."""
    if _EXPERTS in name:
        size, own = bridge.mpu.etp_size, bridge.mpu.etp_rank
    elif getattr(weight, "tensor_model_parallel", False):
        size, own = bridge.mpu.tp_size, bridge.mpu.tp_rank
    else:
        return 1, 0
    return (size, own) if size > 1 else (1, 0)


def _try(bridge: Any, name: str, weight: torch.Tensor) -> tuple[list[str], list[_Form]]:
    shards, own = _shards(bridge, name, weight)
    height, width = as_matrix(weight.shape)
    first = [height, *[1] * (weight.dim() - 1)] if weight.dim() > 1 else [1]
    rest = [1, *weight.shape[1:]] if weight.dim() > 1 else [width]
    rows = [_numbers(height).view(first).expand(weight.shape)] * shards
    columns = [_numbers(width).view(rest).expand(weight.shape)] * shards
    ranks = [number.expand(weight.shape) for number in _numbers(shards)]
    names, of_rows = _through(bridge, name, weight, rows)
    (_, of_columns), (_, of_ranks) = (_through(bridge, name, weight, probes) for probes in (columns, ranks))
    forms = []
    for tensor, *places in zip(names, of_rows, of_columns, of_ranks, strict=True):
        boxes = _boxes(places[0], places[1], places[2], own, (height, width))
        if boxes is None:
            raise ValueError(
                f"{tensor} cannot be planned: what mbridge makes of {name} {list(weight.shape)} is no box of it, nor several"
            )
        forms.append(_Form(tuple(places[0].shape), boxes))
    return names, forms


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cpu")


def _through(
    bridge: Any, name: str, weight: torch.Tensor, shards: list[torch.Tensor]
) -> tuple[list[str], list[torch.Tensor]]:
    """What the export makes of `shards`, one a tensor-parallel rank."""
    with _Unwritten(), _joining_experts(bridge, _EXPERTS in name):
        joined = bridge._weight_merge_across_tp(name, shards, weight) if len(shards) > 1 else shards[0]
        names, tensors = bridge._weight_to_hf_format(name, joined)
    return list(names), list(tensors)


@contextlib.contextmanager
def _joining_experts(bridge: Any, experts: bool) -> Iterator[None]:
    """Experts are joined over ranks of their own; see `mbridge_fixes`, which would gather them here."""
    before = bridge.mpu
    if experts:
        bridge.mpu = dataclasses.replace(before, tp_size=before.etp_size)
    try:
        yield
    finally:
        bridge.mpu = before


class _Unwritten(TorchFunctionMode):
    """Joins tensors that differ along one dimension alone without writing them out: numbers of an embedding's rows
    would take as much memory as the embedding of all ranks."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and (joined := _join(*args, **kwargs)) is not None:
            return joined
        return func(*args, **kwargs)


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first, dim = tensors[0], dim % tensors[0].dim()
    others = [other for other in range(first.dim()) if other != dim]
    if all(_repeats(tensor, other) for tensor in tensors for other in others):
        along = [
            tensor[tuple(slice(None) if place == dim else 0 for place in range(tensor.dim()))] for tensor in tensors
        ]
        joined = torch.cat(along)
        return joined.view([-1 if place == dim else 1 for place in range(first.dim())]).expand(
            [len(joined) if place == dim else first.shape[place] for place in range(first.dim())]
        )
    if all(_repeats(tensor, dim) for tensor in tensors):
        parts = [tensor.narrow(dim, 0, 1) for tensor in tensors]
        if all(torch.equal(part, parts[0]) for part in parts):
            size = list(first.shape)
            size[dim] = sum(tensor.shape[dim] for tensor in tensors)
            return parts[0].expand(size)
    return None


def _repeats(tensor: torch.Tensor, dim: int) -> bool:
    return tensor.shape[dim] == 1 or tensor.stride(dim) == 0


def _boxes(
    rows: torch.Tensor, columns: torch.Tensor, shards: torch.Tensor, own: int, size: tuple[int, int]
) -> list[tuple[int, int, int, int, int, int]] | None:
    """Of one tensor of the checkpoint, made of rank `own`'s parameter of `size` rows and columns. None where it is not made
    of rows and columns of it."""
    row, column = _along(rows, 0), _along(columns, 1)
    by_row, by_column = _along(shards, 0), _along(shards, 1)
    if row is None or column is None or (by_row is None and by_column is None):
        return None
    if row.min() < 0 or row.max() >= size[0] or column.min() < 0 or column.max() >= size[1]:
        return None  # not places, but what was computed of them
    down = _runs(row, by_row, own)
    across = _runs(column, by_column if by_row is None else None, own)
    return [(r, c, height, width, at_r, at_c) for r, at_r, height in down for c, at_c, width in across]


def _along(tensor: torch.Tensor, dim: int) -> np.ndarray | None:
    """The numbers along the rows (0) or the columns (1) of a tensor as a matrix; None where they differ along both."""
    if tensor.dim() < 2:
        tensor = tensor.reshape(1, -1)
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(len(tensor), -1)
    numbers = matrix.select(1 - dim, 0)
    different = matrix.narrow(dim, 0, 1) if _repeats(matrix, dim) else matrix  # the rest of an embedding is the same
    same = _repeats(matrix, 1 - dim) or bool((different == different.narrow(1 - dim, 0, 1)).all())
    return numbers.numpy() if same else None


def _runs(places: np.ndarray, shards: np.ndarray | None, own: int) -> list[tuple[int, int, int]]:
    """Where `places` count up: the beginning, the place there, and how far; of shard `own` alone, where there are several."""
    breaks = places[1:] != places[:-1] + 1
    if shards is not None:
        breaks |= shards[1:] != shards[:-1]
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
    return [
        (start, int(places[start]), stop - start)
        for start, stop in pairwise(bounds)
        if shards is None or shards[start] == own
    ]
