"""The slices of checkpoint tensors that this rank's parameters hold, by the table of the model's family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mbridge.core.util import unwrap_model

from megarl.hf.families.slices import Kind
from megarl.hf.families.stacks import REORDERED, in_stored_order
from megarl.megatron.model.bridge import TableWeights, checkpoint_parameters
from megarl.megatron.model.build import Model
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder


def held_slices(model: Model) -> SliceTable:
    """Describe this rank's parameters."""
    return describe(model.bridge, model.lora.base() if model.lora else model.chunks)


class HeldTensors(Sequence[torch.Tensor]):
    """The tensors that `held_slices` describes, contiguous and with current values; adapters are merged.

    If the slices of a parameter count another order of elements, it is copied when it is read, and the last copy is kept: a copy of all
    would take as much memory as the experts.
    """

    def __init__(self, weights: Sequence[tuple[Kind, torch.Tensor]]) -> None:
        self._weights = weights
        self._last: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, number: Any) -> Any:
        kind, weight = self._weights[number]
        if kind not in REORDERED:
            return weight
        if self._last is None or self._last[0] != number:
            self._last = number, in_stored_order(kind, weight).contiguous()
        return self._last[1]


def held_tensors(model: Model) -> HeldTensors:
    """Return the tensors of the parameters that `held_slices` describes, in its order."""
    weights = []
    for chunk in map(unwrap_model, model.merged_chunks):
        names = model.bridge.global_names(chunk)
        weights += [
            (model.bridge.row_of(names[name]).kind, weight.data) for name, weight in checkpoint_parameters(chunk)
        ]
    return HeldTensors(weights)


def parameter_names(model: Model) -> list[str]:
    """Return the names of the parameters that `held_slices` describes, in the order of `held_tensors`."""
    chunks = enumerate(map(unwrap_model, model.merged_chunks))
    return [f"{number}/{name}" for number, chunk in chunks for name, _ in checkpoint_parameters(chunk)]


def describe(bridge: TableWeights, chunks: Sequence[Any]) -> SliceTable:
    """Describe the parameters of the rank that `bridge.mpu` names; `chunks` only need the right shapes."""
    builder = SliceTableBuilder()
    for number, chunk in enumerate(map(unwrap_model, chunks)):
        names = bridge.global_names(chunk)
        for name, weight in checkpoint_parameters(chunk):
            parameter = builder.parameter(f"{number}/{name}", str(weight.dtype).removeprefix("torch."))
            for tensor, place in bridge.slices_of(names[name], weight):
                number_of_tensor = builder.tensor(tensor, place.shape)
                for row, column, rows, columns, offset, stride in place.slices:
                    builder.add(number_of_tensor, (row, column, rows, columns), parameter, offset, stride)
    return builder.build()
