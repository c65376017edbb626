"""The slices of checkpoint tensors that this rank's parameters hold, derived by running probes through mbridge's export.

mbridge joins the shards of all tensor-parallel ranks and splits the result into the checkpoint's tensors. Probes that
hold row, column and rank numbers pass through the same two methods, and show where each element of a parameter ends up.
Ranks do not communicate, and each kind of parameter is probed once. No table of models is needed: every model that
mbridge can export can be described.
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

from megarl.megatron.model.build import Model
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, as_matrix

_EXPERTS = ".mlp.experts.linear_fc"

Slice = tuple[int, int, int, int, int, int]
"""Row, column, rows and columns in the checkpoint's tensor (as a matrix); row and column in the parameter."""


def held_slices(model: Model) -> SliceTable:
    """Describe this rank's parameters, under the names that `parameters` yields.

    Raises ValueError if mbridge's export of a parameter is not a set of slices: sharded sync is then impossible.
    """
    return describe(model.bridge, model.lora.base() if model.lora else model.chunks)


def parameters(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that `held_slices` describes, with current values; adapters are merged on each call."""
    for number, chunk in enumerate(model.merged_chunks):
        for name, weight in _weights(chunk):
            yield f"{number}/{name}", weight


def describe(bridge: Any, chunks: Sequence[Any], forms: Forms | None = None) -> SliceTable:
    """Describe the parameters of rank `bridge.mpu`; `chunks` only need the right shapes.

    `forms`: a cache that several ranks of the same bridge may share.
    """
    from mbridge.core.util import unwrap_model

    builder, forms = SliceTableBuilder(), forms or Forms(bridge)
    for number, chunk in enumerate(map(unwrap_model, chunks)):
        global_names = bridge._weight_name_mapping_mcore_local_to_global(chunk)
        for name, weight in _weights(chunk):
            parameter = builder.parameter(f"{number}/{name}", str(weight.dtype).removeprefix("torch."))
            stride = as_matrix(weight.shape)[1]
            for tensor, form in forms.of(global_names[name], weight):
                place = builder.tensor(tensor, form.shape)
                for row, column, rows, columns, at_row, at_column in form.slices:
                    builder.add(place, (row, column, rows, columns), parameter, at_row * stride + at_column, stride)
    return builder.build()


def _weights(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that mbridge exports: parameters, and routing biases (buffers)."""
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
    """A checkpoint tensor that mbridge makes of a kind of parameter, and the slices that a rank's shard holds."""

    shape: tuple[int, ...]
    slices: list[Slice]


class Forms:
    """Cache of forms by kind of parameter.

    Layers and experts of one kind differ only by their numbers, and so do ranks that hold full copies of a parameter.
    """

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._by_kind: dict[tuple[Any, ...], list[_Form]] = {}

    def of(self, name: str, weight: torch.Tensor) -> list[tuple[str, _Form]]:
        """Return (checkpoint tensor, form) of a parameter. `name`: Megatron's, with global layer and expert numbers."""
        key = (re.sub(r"\d+", "#", name), weight.shape, *_shards(self._bridge, name, weight))
        names = self._bridge._weight_name_mapping_mcore_to_hf(name)
        forms = self._by_kind.get(key)
        if forms is None or len(forms) != len(names):
            names, forms = _probe(self._bridge, name, weight)
            self._by_kind[key] = forms
        return list(zip(names, forms, strict=True))


def _shards(bridge: Any, name: str, weight: torch.Tensor) -> tuple[int, int]:
    """Return (number of shards that mbridge joins, this rank's shard); (1, 0) if every rank has the full parameter."""
    if _EXPERTS in name:
        size, rank = bridge.mpu.etp_size, bridge.mpu.etp_rank
    elif getattr(weight, "tensor_model_parallel", False):
        size, rank = bridge.mpu.tp_size, bridge.mpu.tp_rank
    else:
        return 1, 0
    return (size, rank) if size > 1 else (1, 0)


def _probe(bridge: Any, name: str, weight: torch.Tensor) -> tuple[list[str], list[_Form]]:
    """Export row, column and rank numbers in place of `weight`; return checkpoint tensors and their forms."""
    shards, rank = _shards(bridge, name, weight)
    height, width = as_matrix(weight.shape)
    first = [height, *[1] * (weight.dim() - 1)] if weight.dim() > 1 else [1]
    rest = [1, *weight.shape[1:]] if weight.dim() > 1 else [width]
    rows = [_numbers(height).view(first).expand(weight.shape)] * shards
    columns = [_numbers(width).view(rest).expand(weight.shape)] * shards
    ranks = [number.expand(weight.shape) for number in _numbers(shards)]
    names, row_numbers = _through(bridge, name, weight, rows)
    (_, column_numbers), (_, rank_numbers) = (_through(bridge, name, weight, probes) for probes in (columns, ranks))
    forms = []
    for tensor, *numbers in zip(names, row_numbers, column_numbers, rank_numbers, strict=True):
        slices = _slices(numbers[0], numbers[1], numbers[2], rank, (height, width))
        if slices is None:
            raise ValueError(
                f"{tensor} cannot be planned: mbridge's export of {name} {list(weight.shape)} is not a set of slices of it"
            )
        forms.append(_Form(tuple(numbers[0].shape), slices))
    return names, forms


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cpu")


def _through(
    bridge: Any, name: str, weight: torch.Tensor, shards: list[torch.Tensor]
) -> tuple[list[str], list[torch.Tensor]]:
    """Export `shards`, one per tensor-parallel rank."""
    with _LazyCat(), _joining_experts(bridge, _EXPERTS in name):
        joined = bridge._weight_merge_across_tp(name, shards, weight) if len(shards) > 1 else shards[0]
        names, tensors = bridge._weight_to_hf_format(name, joined)
    return list(names), list(tensors)


@contextlib.contextmanager
def _joining_experts(bridge: Any, experts: bool) -> Iterator[None]:
    """Join experts over expert-tensor-parallel ranks without the gather that `upstream_fixes` adds."""
    before = bridge.mpu
    if experts:
        bridge.mpu = dataclasses.replace(before, tp_size=before.etp_size)
    try:
        yield
    finally:
        bridge.mpu = before


class _LazyCat(TorchFunctionMode):
    """Concatenate expanded tensors without materializing them: row numbers of an embedding would otherwise take as much
    memory as the embedding of all ranks."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and (joined := _join(*args, **kwargs)) is not None:
            return joined
        return func(*args, **kwargs)


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first, dim = tensors[0], dim % tensors[0].dim()
    other_dims = [other for other in range(first.dim()) if other != dim]
    if all(_repeats(tensor, other) for tensor in tensors for other in other_dims):
        along = [tensor[tuple(slice(None) if axis == dim else 0 for axis in range(tensor.dim()))] for tensor in tensors]
        joined = torch.cat(along)
        return joined.view([-1 if axis == dim else 1 for axis in range(first.dim())]).expand(
            [len(joined) if axis == dim else first.shape[axis] for axis in range(first.dim())]
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


def _slices(
    rows: torch.Tensor, columns: torch.Tensor, shards: torch.Tensor, rank: int, size: tuple[int, int]
) -> list[Slice] | None:
    """Return the slices of a checkpoint tensor that come from shard `rank` of a parameter.

    `rows`, `columns`, `shards`: the exported probes. `size`: rows and columns of the shard. None if the tensor is not
    made of rows and columns of the parameter.
    """
    row, column = _along(rows, 0), _along(columns, 1)
    by_row, by_column = _along(shards, 0), _along(shards, 1)
    if row is None or column is None or (by_row is None and by_column is None):
        return None
    if row.min() < 0 or row.max() >= size[0] or column.min() < 0 or column.max() >= size[1]:
        return None  # mbridge computed with the numbers instead of moving them
    down = _runs(row, by_row, rank)
    across = _runs(column, by_column if by_row is None else None, rank)
    return [(r, c, height, width, at_r, at_c) for r, at_r, height in down for c, at_c, width in across]


def _along(tensor: torch.Tensor, dim: int) -> np.ndarray | None:
    """Return the numbers along rows (0) or columns (1) of a tensor as a matrix; None if they vary along both."""
    if tensor.dim() < 2:
        tensor = tensor.reshape(1, -1)
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(len(tensor), -1)
    numbers = matrix.select(1 - dim, 0)
    different = matrix.narrow(dim, 0, 1) if _repeats(matrix, dim) else matrix  # expanded: all rows are equal
    same = _repeats(matrix, 1 - dim) or bool((different == different.narrow(1 - dim, 0, 1)).all())
    return numbers.numpy() if same else None


def _runs(numbers: np.ndarray, shards: np.ndarray | None, rank: int) -> list[tuple[int, int, int]]:
    """Return runs of consecutive `numbers` in shard `rank` (None: all): index, number there, length."""
    breaks = numbers[1:] != numbers[:-1] + 1
    if shards is not None:
        breaks |= shards[1:] != shards[:-1]
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(numbers)]
    return [
        (start, int(numbers[start]), stop - start)
        for start, stop in pairwise(bounds)
        if shards is None or shards[start] == rank
    ]
