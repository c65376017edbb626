"""What a rank holds of a model and its optimizer, as pieces of whole tensors: the layout drops out.

Megatron's `sharded_state_dict` says where each local weight lies in the whole one (experts and pipeline
stages included). The optimizer's states lie where their weight does; a distributed optimizer's are the
elements [start, stop) of a flattened weight, which `boxes` turns into boxes of the whole.

    weight.NAME      in the model's data type
    master.NAME      float32, where the optimizer keeps weights in higher precision than the model
    exp_avg.NAME, exp_avg_sq.NAME      Adam's moments
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from megarl.megatron.lora.attach import is_adapter
from megarl.megatron.model import Model
from megarl.megatron.optimizer import inner_optimizers, members
from megarl.megatron.tensor_files import Piece, boxes
from megarl.platform import swapped

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Share:
    """The elements [start, stop) of a flattened weight, and what an optimizer keeps for them, as flat tensors."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]
    divided: bool  # data-parallel ranks have different shares of the weight, instead of the same


def pieces_to_save(model: Model, optimizer: Any) -> Iterator[Piece]:
    """This rank's pieces. Those of all ranks together are every tensor once.

    A weight is written by the rank that writes its moments: under a distributed optimizer all ranks write
    about as much. Nothing is gathered or copied.
    """
    shares = _shares(optimizer)
    divided = _divided(optimizer)
    for entry in _entries(model):
        share = shares.get(id(entry.data))
        replica = tuple(entry.replica_id) if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
        if share is None:
            if id(entry.data) not in divided and not any(replica):
                yield from _whole(entry)
        elif not any(replica[:-1] if share.divided else replica):  # (stage, tensor, data) parallel
            flat = entry.data.data.view(-1)[share.start : share.stop]
            yield from _of_share(entry, share, {"weight": flat, **share.states})


def pieces_to_load(model: Model, optimizer: Any) -> Iterator[Piece]:
    """Everything on this rank, as views that are to be filled: whole local weights, and the optimizer's states where
    there is one."""
    shares = {} if optimizer is None else _shares(optimizer)
    for entry in _entries(model):
        yield from _whole(entry)
        if share := shares.get(id(entry.data)):
            yield from _of_share(entry, share, share.states)


def updates(optimizer: Any) -> int:
    """Updates that Adam has counted on this rank; 0 where it holds nothing."""
    counts = [0]
    for inner in (inner for member in members(optimizer) for inner in inner_optimizers(member)):
        counts += [int(group["step"]) for group in inner.param_groups if "step" in group]
        counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(counts)


def set_updates(optimizer: Any, count: int) -> None:
    """Let Adam's bias correction go on from `count`: torch's Adam counts by parameter, fused ones by group."""
    for inner in (inner for member in members(optimizer) for inner in inner_optimizers(member)):
        by_parameter = [state["step"] for state in inner.state.values() if "step" in state]
        for steps in by_parameter:
            steps.fill_(count)
        for group in () if by_parameter else inner.param_groups:
            group["step"] = swapped.count_of_updates(inner, count)


def _entries(model: Model) -> Iterator[Any]:
    """Megatron's description of each local weight and persistent buffer; its `data` is the parameter itself.

    Of a model with adapters, those alone: the rest is what model.path holds.
    Transformer Engine's extra states are left out: they hold scaling histories of FP8, which begin anew.
    """
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in model.chunks:
        module = getattr(chunk, "module", chunk)  # of a wrapper: DDP's, or the one for bfloat16
        for entry in nested_values(module.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and (not model.lora or is_adapter(entry.key)):
                yield entry


def _parts(entry: Any) -> Iterator[tuple[ShardedTensor, int]]:
    """Parts of a weight that are pieces of the whole each, with the flat index at which each begins.

    There is one, but for gated layers: gate and up projection are one local weight, cut apart in the whole.
    """
    if isinstance(entry, ShardedTensor):
        yield entry, 0
        return
    for part in nested_values(entry.build()):
        assert part.data.is_contiguous(), f"{part.key} is cut across its rows: it has no flat range of its own"
        yield part, part.data.storage_offset() - entry.data.storage_offset()


def _whole(entry: Any) -> Iterator[Piece]:
    for part, _ in _parts(entry):
        tensor = part.data.detach().view((1,) * part.prepend_axis_num + tuple(part.data.shape))
        yield Piece(
            f"weight.{part.key}", tuple(part.global_shape), tuple(part.global_offset), tensor, part.allow_shape_mismatch
        )


def _of_share(entry: Any, share: _Share, tensors: dict[str, torch.Tensor]) -> Iterator[Piece]:
    for part, begin in _parts(entry):
        low = max(share.start, begin)
        high = min(share.stop, begin + part.data.numel())
        place = low - share.start
        prepended = (0,) * part.prepend_axis_num
        for offset, shape in boxes(low - begin, high - begin, tuple(part.local_shape)):
            size = math.prod(shape)
            where = tuple(a + b for a, b in zip(part.global_offset, prepended + offset, strict=True))
            full = (1,) * part.prepend_axis_num + shape
            for kind, flat in tensors.items():
                box = flat[place : place + size].view(full)
                yield Piece(f"{kind}.{part.key}", tuple(part.global_shape), where, box, part.allow_shape_mismatch)
            place += size


def _divided(optimizer: Any) -> set[int]:
    """Parameters (by id) of which each data-parallel rank's optimizer has its own part, or none."""
    return {
        id(parameter)
        for member in members(optimizer)
        if _is_distributed(member)
        for buffer in member.buffers
        for parameter in buffer.param_index_map
    }


def _shares(optimizer: Any) -> dict[int, _Share]:
    """What this rank's optimizer holds, by the id of the parameter."""
    shares = {}
    for member in members(optimizer):
        swapped.wait_for_host_tensors(member)
        if _is_distributed(member):
            for parameter, start, stop in _ranges(member):
                tensors = member._get_main_param_and_optimizer_states(parameter)
                states = _states(member, parameter, tensors["param"], tensors)
                shares[id(parameter)] = _Share(start, stop, states, divided=True)
        else:
            for parameter, main in _pairs(member):
                states = _states(member, parameter, main, member.optimizer.state[main])
                shares[id(parameter)] = _Share(0, parameter.numel(), states, divided=False)
    return shares


def _states(
    member: Any, parameter: torch.Tensor, main: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Moments and master weight of `main`, the optimizer's tensor for `parameter`: flat, wherever they are kept."""
    states = {name: swapped.resident(member, main, name, tensors[name]).view(-1) for name in _MOMENTS}
    if main.untyped_storage().data_ptr() != parameter.data.untyped_storage().data_ptr():
        states["master"] = swapped.resident(member, main, "param", main.data).view(-1)
    return states


def _is_distributed(member: Any) -> bool:
    """Compare no classes: what adapts Megatron to a device may replace this one's between two models of a process."""
    return hasattr(member, "gbuf_ranges")


def _ranges(member: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    for buffer in member.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _pairs(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with the one that the optimizer updates, which is itself where it is float32."""
    if isinstance(member, FP32Optimizer):
        yield from ((p, p) for group in member.optimizer.param_groups for p in group["params"])
        return
    assert isinstance(member, Float16OptimizerWithFloat16Params), type(member)
    for weights, masters in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
        yield from zip(weights, masters, strict=True)
    yield from ((p, p) for group in member.fp32_from_fp32_groups for p in group)
