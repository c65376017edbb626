"""The slices of checkpoint tensors that this rank's parameters hold, by the table of the model's family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mbridge.core.util import unwrap_model

from megarl.megatron.model.bridge import TableWeights, checkpoint_parameters
from megarl.megatron.model.build import Model
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder


def held_slices(model: Model) -> SliceTable:
    """Describe this rank's parameters, under the names that `parameters` yields."""
    return describe(model.bridge, model.lora.base() if model.lora else model.chunks)


def parameters(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that `held_slices` describes, with current values; adapters are merged on each call."""
    for number, chunk in enumerate(model.merged_chunks):
        for name, weight in checkpoint_parameters(unwrap_model(chunk)):
            yield f"{number}/{name}", weight


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
