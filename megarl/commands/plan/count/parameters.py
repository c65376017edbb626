"""What a trainer holds between steps, counted from its tensors: real ones, or those of a platform without memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megarl.commands.plan.count.counts import Held
from megarl.megatron.model import parameters_on_rank
from megarl.megatron.optimizer import members
from megarl.megatron.trainer import PolicyTrainer, Trainer
from megarl.platform.memory import pinned
from megarl.recipe.optimizer_extra import host_share

_MOMENT_BYTES = 8  # Adam's two moments of an element, in float32


def held(trainer: Trainer) -> Held:
    """Count what `trainer` holds on its rank."""
    chunks, optimizer = trainer.model.chunks, trainer.optimizer
    weights = _storages(parameter.data for chunk in chunks for parameter in chunk.parameters())
    gradients, masters, moments = [], [], []
    if optimizer is not None:
        gradients = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        masters = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
        states = [state for member in members(optimizer) for state in member.optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    moments_bytes = _bytes(_storages(moments))
    share = (
        moments_bytes // _MOMENT_BYTES * trainer.model.dtype.itemsize
    )  # of the weights: the elements that moments are of
    own_masters = {key: storage for key, storage in _storages(masters).items() if key not in weights}
    found = Held(
        parameters=parameters_on_rank(trainer.model),
        trained=parameters_on_rank(trainer.model, trained=True),
        weights=_bytes(weights),
        buffers=_bytes(_storages(buffer for chunk in chunks for _, buffer in chunk.named_buffers())),
        gradients=_bytes(_storages(gradients)),
        masters=_bytes(own_masters),
        moments=moments_bytes,
        reference=trainer.reference_bytes() if isinstance(trainer, PolicyTrainer) else 0,
        weights_pinned=_pinned(weights),
        states_pinned=_pinned(own_masters) + _pinned(_storages(moments)),
        reference_pinned=sum(pinned(size) for size in trainer.reference_sizes())
        if isinstance(trainer, PolicyTrainer)
        else 0,
        saved=_bytes(own_masters) + moments_bytes + share,
    )
    return found.with_states_on_host(host_share(trainer.recipe.actor.optimizer))


def largest_rank(trainer: Trainer) -> int:
    """Of the ranks of this one's pipeline stage, the first whose share of the optimizer's states is the largest.

    Megatron cuts buffers into equal shares, and what of a share is padding has no states. Ranks of a stage hold the same
    buffers, and stand in the order tensor, context, data parallel; for experts, expert tensor, expert, data parallel.
    """
    megatron, world = trainer.recipe.megatron, dist.get_world_size()
    ranks = world // megatron.pipeline_parallel
    first = dist.get_rank() // ranks * ranks
    if not megatron.distributed_optimizer:
        return first
    dense = [buffer for chunk in trainer.model.chunks for buffer in chunk.buffers]
    experts = [buffer for chunk in trainer.model.chunks for buffer in chunk.expert_parallel_buffers]
    copies = (megatron.expert_tensor_parallel or 1) * megatron.expert_parallel
    sizes = [_share(dense, rank // megatron.tensor_parallel) + _share(experts, rank // copies) for rank in range(ranks)]
    return first + sizes.index(max(sizes))


def _share(buffers: list[Any], number: int) -> int:
    """Elements of parameters in share `number` of `buffers`."""
    total = 0
    for buffer in buffers:
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // buffer.data_parallel_world_size
            begin = bucket.offset + number * size
            for start, end, _ in (buffer.param_index_map[parameter] for parameter in bucket.params):
                total += max(0, min(end, begin + size) - max(start, begin))
    return total


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each memory once, whatever views there are of it."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def _bytes(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def _pinned(storages: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of page-locked copies, one a storage."""
    return sum(pinned(storage.nbytes()) for storage in storages.values())
