"""Memory that a trainer holds between steps, counted from its tensors (real ones, or ones without memory)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megarl.commands.plan.count.types import RankMemory
from megarl.megatron.model.build import parameters_on_rank
from megarl.megatron.optimizer import members
from megarl.megatron.reference import reference_sizes
from megarl.megatron.trainer import PolicyTrainer, Trainer
from megarl.platform.adaptor import pinned
from megarl.recipe.derived.optimizer_extra import host_share

_MOMENT_BYTES = 8  # Adam's two float32 moments of a parameter


def held(trainer: Trainer) -> RankMemory:
    """Count the memory that `trainer` holds on its rank."""
    chunks, optimizer = trainer.model.chunks, trainer.optimizer
    weights = _storages(parameter.data for chunk in chunks for parameter in chunk.parameters())
    gradients, masters, moments = [], [], []
    if optimizer is not None:
        gradients = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        masters = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
        states = [state for member in members(optimizer) for state in member.optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    moments_bytes = _bytes(_storages(moments))
    share = moments_bytes // _MOMENT_BYTES * trainer.model.dtype.itemsize  # weights of the parameters with moments
    if trainer.model.lora is None:  # of adapters' model, a checkpoint has the adapters alone
        frozen = [p.data for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
        share += _bytes(_storages(frozen))
    own_masters = {key: storage for key, storage in _storages(masters).items() if key not in weights}
    refreshed = isinstance(trainer, PolicyTrainer) and trainer.recipe.algorithm.refresh_reference_every > 0
    reference = reference_sizes(trainer.model, refreshed=refreshed) if isinstance(trainer, PolicyTrainer) else []
    memory = RankMemory(
        parameters=parameters_on_rank(trainer.model),
        trained=parameters_on_rank(trainer.model, trained=True),
        weights=_bytes(weights),
        buffers=_bytes(_storages(buffer for chunk in chunks for _, buffer in chunk.named_buffers())),
        gradients=_bytes(_storages(gradients)),
        masters=_bytes(own_masters),
        moments=moments_bytes,
        reference=sum(reference),
        weights_pinned=_pinned(weights),
        states_pinned=_pinned(own_masters) + _pinned(_storages(moments)),
        reference_pinned=sum(pinned(size) for size in reference),
        saved=_bytes(own_masters) + moments_bytes + share * (2 if refreshed else 1),
    )
    return memory.with_states_on_host(host_share(trainer.recipe.actor.optimizer))


def largest_rank(trainer: Trainer) -> int:
    """Return the first rank of this pipeline stage with the largest share of the optimizer states.

    Megatron cuts buffers into equal shares, and padding in a share has no states. Ranks of a stage hold equal buffers and
    are ordered tensor, context, data parallel; for experts: expert tensor, expert, data parallel.
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
    """Count the parameters' elements in share `number` of `buffers`."""
    total = 0
    for buffer in buffers:
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // buffer.data_parallel_world_size
            begin = bucket.offset + number * size
            for start, end, _ in (buffer.param_index_map[parameter] for parameter in bucket.params):
                total += max(0, min(end, begin + size) - max(start, begin))
    return total


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, however many views it has."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def _bytes(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def _pinned(storages: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of page-locked copies, one per storage."""
    return sum(pinned(storage.nbytes()) for storage in storages.values())
