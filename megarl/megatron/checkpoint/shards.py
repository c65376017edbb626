"""Model and optimizer states of a rank as shards of full tensors, independent of the parallel layout.

Megatron's `sharded_state_dict` gives the position of each local weight in the full tensor (experts and pipeline
stages included). Optimizer states have the position of their weight; a distributed optimizer holds the elements
[start, stop) of a flattened weight, which `slices_of_range` converts to slices of the full tensor.

    weight.NAME      in the model's data type
    master.NAME      float32, if the optimizer keeps weights in higher precision than the model
    exp_avg.NAME, exp_avg_sq.NAME      Adam's moments
    reference.NAME      the reference policy's, after a refresh (`algorithm.refresh_reference_every`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from megarl.megatron.checkpoint.tensor_files import TensorShard, slices_of_range
from megarl.megatron.lora.attach import is_adapter
from megarl.megatron.model.build import Model
from megarl.megatron.optimizer import inner_optimizers, members
from megarl.platform import swapped_states

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _OptimizerRange:
    """The elements [start, stop) of a flattened weight and their optimizer states, as flat tensors."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]
    divided: bool  # data-parallel ranks hold different ranges of the weight instead of copies


def shards_to_save(model: Model, optimizer: Any, reference: Mapping[int, torch.Tensor]) -> Iterator[TensorShard]:
    """Yield this rank's shards. All ranks together yield every element of every tensor exactly once.

    The rank that writes a weight's moments also writes the weight, so a distributed optimizer spreads the writes
    evenly over ranks. Nothing is gathered or copied. reference: see `ReferencePolicy.tensors`.
    """
    ranges = _ranges_by_parameter(optimizer)
    divided = _divided(optimizer)
    for entry in _entries(model):
        held, kept = ranges.get(id(entry.data)), reference.get(id(entry.data))
        replica = tuple(entry.replica_id) if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
        if held is None:
            if id(entry.data) not in divided and not any(replica):
                yield from _full_weight(entry)
                if kept is not None:
                    yield from _full_weight(replace(entry, data=kept), "reference")
        elif not any(replica[:-1] if held.divided else replica):  # (stage, tensor, data) parallel
            tensors = {"weight": entry.data.data} | ({} if kept is None else {"reference": kept})
            flat = {name: tensor.view(-1)[held.start : held.stop] for name, tensor in tensors.items()}
            yield from _shards_of_range(entry, held, flat | held.states)


def shards_to_load(model: Model, optimizer: Any) -> Iterator[TensorShard]:
    """Yield everything on this rank as views to fill: local weights, and optimizer states if there is an optimizer."""
    ranges = {} if optimizer is None else _ranges_by_parameter(optimizer)
    for entry in _entries(model):
        yield from _full_weight(entry)
        if held := ranges.get(id(entry.data)):
            yield from _shards_of_range(entry, held, held.states)


def reference_to_load(model: Model, reference: Mapping[int, torch.Tensor]) -> Iterator[TensorShard]:
    """Yield the tensors of `reference` (see `ReferencePolicy.tensors`) as views to fill."""
    missing = set(reference)
    for entry in _entries(model):
        if id(entry.data) in reference:
            missing.discard(id(entry.data))
            yield from _full_weight(replace(entry, data=reference[id(entry.data)]), "reference")
    assert not missing, f"{len(missing)} weights of the reference policy are in no checkpoint"


def updates(optimizer: Any) -> int:
    """Return the number of updates that Adam has counted on this rank; 0 if this rank has no optimizer states."""
    counts = [0]
    for inner in (inner for member in members(optimizer) for inner in inner_optimizers(member)):
        counts += [int(group["step"]) for group in inner.param_groups if "step" in group]
        counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(counts)


def forget_updates(optimizer: Any) -> None:
    """Set Adam's moments to 0, and its number of updates: the state before the first update."""
    for held in _ranges_by_parameter(optimizer).values():
        for name in _MOMENTS:
            held.states[name].zero_()
    set_updates(optimizer, 0)


def set_updates(optimizer: Any, count: int) -> None:
    """Continue Adam's bias correction from `count` updates. torch counts per parameter, fused Adams per group."""
    for inner in (inner for member in members(optimizer) for inner in inner_optimizers(member)):
        by_parameter = [state["step"] for state in inner.state.values() if "step" in state]
        for steps in by_parameter:
            steps.fill_(count)
        for group in () if by_parameter else inner.param_groups:
            group["step"] = swapped_states.count_of_updates(inner, count)


def _entries(model: Model) -> Iterator[Any]:
    """Yield Megatron's description of each local weight and persistent buffer; `data` is the parameter itself.

    With LoRA, only the adapters: model.path holds the base weights.
    Transformer Engine's extra states (FP8 scaling histories) are skipped; they restart after a load.
    """
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in model.chunks:
        module = getattr(chunk, "module", chunk)  # unwrap DDP or Float16Module
        for entry in nested_values(module.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and (not model.lora or is_adapter(entry.key)):
                yield entry


def _parts(entry: Any) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the parts of a weight that are contiguous in the full tensor, with their flat start index in the weight.

    Gated layers have two: gate and up projection are one local weight but separate slices of the full tensor.
    """
    if isinstance(entry, ShardedTensor):
        yield entry, 0
        return
    for part in nested_values(entry.build()):
        assert part.data.is_contiguous(), f"{part.key} is split across its rows: it has no contiguous flat range"
        yield part, part.data.storage_offset() - entry.data.storage_offset()


def _full_weight(entry: Any, kind: str = "weight") -> Iterator[TensorShard]:
    for part, _ in _parts(entry):
        tensor = part.data.detach().view((1,) * part.prepend_axis_num + tuple(part.data.shape))
        yield TensorShard(
            f"{kind}.{part.key}", tuple(part.global_shape), tuple(part.global_offset), tensor, part.allow_shape_mismatch
        )


def _shards_of_range(entry: Any, held: _OptimizerRange, tensors: dict[str, torch.Tensor]) -> Iterator[TensorShard]:
    for part, begin in _parts(entry):
        low = max(held.start, begin)
        high = min(held.stop, begin + part.data.numel())
        position = low - held.start
        prepended = (0,) * part.prepend_axis_num
        for offset, shape in slices_of_range(low - begin, high - begin, tuple(part.local_shape)):
            size = math.prod(shape)
            where = tuple(a + b for a, b in zip(part.global_offset, prepended + offset, strict=True))
            full = (1,) * part.prepend_axis_num + shape
            for kind, flat in tensors.items():
                view = flat[position : position + size].view(full)
                yield TensorShard(
                    f"{kind}.{part.key}", tuple(part.global_shape), where, view, part.allow_shape_mismatch
                )
            position += size


def _divided(optimizer: Any) -> set[int]:
    """Return ids of parameters with optimizer states divided over data-parallel ranks."""
    return {
        id(parameter)
        for member in members(optimizer)
        if _is_distributed(member)
        for buffer in member.buffers
        for parameter in buffer.param_index_map
    }


def _ranges_by_parameter(optimizer: Any) -> dict[int, _OptimizerRange]:
    """Return the optimizer states of this rank by the id of their parameter."""
    ranges = {}
    for member in members(optimizer):
        swapped_states.wait_for_host_tensors(member)
        if _is_distributed(member):
            for parameter, start, stop in _ranges(member):
                tensors = member._get_main_param_and_optimizer_states(parameter)
                states = _states(member, parameter, tensors["param"], tensors)
                ranges[id(parameter)] = _OptimizerRange(start, stop, states, divided=True)
        else:
            for parameter, main in _pairs(member):
                states = _states(member, parameter, main, member.optimizer.state[main])
                ranges[id(parameter)] = _OptimizerRange(0, parameter.numel(), states, divided=False)
    return ranges


def _states(
    member: Any, parameter: torch.Tensor, main: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return moments and master weight of `main`, the optimizer's tensor for `parameter`, as flat tensors."""
    states = {name: swapped_states.resident(member, main, name, tensors[name]).view(-1) for name in _MOMENTS}
    if main.untyped_storage().data_ptr() != parameter.data.untyped_storage().data_ptr():
        states["master"] = swapped_states.resident(member, main, "param", main.data).view(-1)
    return states


def _is_distributed(member: Any) -> bool:
    """Test for an attribute, not a class: the device adaptor may replace Megatron's class between two models."""
    return hasattr(member, "gbuf_ranges")


def _ranges(member: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    for buffer in member.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _pairs(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter with the tensor that the optimizer updates: the parameter itself if it is float32."""
    if isinstance(member, FP32Optimizer):
        yield from ((p, p) for group in member.optimizer.param_groups for p in group["params"])
        return
    assert isinstance(member, Float16OptimizerWithFloat16Params), type(member)
    for weights, masters in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
        yield from zip(weights, masters, strict=True)
    yield from ((p, p) for group in member.fp32_from_fp32_groups for p in group)
