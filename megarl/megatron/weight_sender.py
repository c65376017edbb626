"""Open the sharded weight sync's sender on a trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megarl.megatron.held_slices import held_slices, held_tensors, parameter_names
from megarl.megatron.model.build import Model
from megarl.recipe.schema import WeightSyncConfig
from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import check_transport, host_id
from megarl.weight_sync.sharded.sender import ShardedSender


def open_sender(
    model: Model, weight_sync: WeightSyncConfig, receivers: Sequence[tuple[str, str]], host: str, device: str
) -> ShardedSender | str:
    """Open the sender on every trainer rank. Collective.

    `receivers`: (name, host id). `host`: rank 0's address as the other ranks reach it. `device`: device kind of all
    ranks. Returns the reason, on every rank, if a rank's parameters cannot be described as slices.
    """
    rank, description = dist.get_rank(), _describe_rank(model)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (host_id(), description if isinstance(description, str) else None))
    for number, (_, problem) in enumerate(all_ranks):
        if problem is not None:
            return f"trainer rank {number}: {problem}"
    hosts = [host_of_rank for host_of_rank, _ in all_ranks]
    try:
        # Every rank checks: `start_session` runs on rank 0 only, and the others would wait for it.
        check_transport(weight_sync.transport, hosts, receivers)
    except ValueError as error:
        return str(error)
    session_box: list[Any] = [None]
    if rank == 0:
        session, store = start_session(
            host,
            hosts,
            receivers,
            transport=weight_sync.transport,
            sharded=True,
            bucket_bytes=weight_sync.bucket_mb << 20,
            timeout=weight_sync.timeout,
            check_every=weight_sync.check_every,
            device=device,
            heartbeat_timeout=weight_sync.silence,
        )
        session_box = [session]
    dist.broadcast_object_list(session_box, src=0)
    assert not isinstance(description, str)
    return ShardedSender(session_box[0], rank, description, lambda: held_tensors(model), store if rank == 0 else None)


def _describe_rank(model: Model) -> Any:
    """Return the description of this rank's slices, or the reason why they cannot be described."""
    try:
        held = held_slices(model)
    except Exception as error:  # noqa: BLE001 - sent to all ranks, which would otherwise wait for this one
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    assert list(held.parameters) == parameter_names(model), "parameters must be in the order of their description"
    return held
