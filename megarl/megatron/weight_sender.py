"""A trainer rank as a sender of a planned weight exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.megatron.held_slices import holdings, parameters
from megarl.megatron.model import Model
from megarl.recipe.schema import ExchangeConfig
from megarl.weight_sync.session import host_id, resolve_transports
from megarl.weight_sync.sharded.sender import ShardedSender, open_sharded_session


def open_sender(
    model: Model, exchange: ExchangeConfig, receivers: Sequence[tuple[str, str]], host: str, device: str
) -> ShardedSender | str:
    """Collective over all ranks. `receivers`: (name, host id). `host`: of rank 0, as all others reach it. `device`: the
    kind of everyone's. Where what a rank holds cannot be described: the reason, on every rank."""
    rank, said = dist.get_rank(), _described(model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host_id(), said if isinstance(said, str) else None))
    for number, (_, problem) in enumerate(everyone):
        if problem is not None:
            return f"trainer rank {number}: {problem}"
    try:
        for (
            host_of_rank,
            _,
        ) in everyone:  # here, since `open_sharded_session` is called on one rank alone: others would wait for it
            resolve_transports(exchange.transport, host_of_rank, receivers)
    except ValueError as error:
        return str(error)
    met: list[Any] = [None]
    if rank == 0:
        session, store = open_sharded_session(
            host,
            [one for one, _ in everyone],
            receivers,
            transport=exchange.transport,
            bucket_bytes=exchange.bucket_mb << 20,
            timeout=exchange.timeout,
            check_every=exchange.check_every,
            device=device,
            heartbeat_timeout=exchange.silence,
        )
        met = [session]
    dist.broadcast_object_list(met, src=0)
    assert not isinstance(said, str)

    def tensors() -> list[torch.Tensor]:
        return [tensor.data for _, tensor in parameters(model)]

    return ShardedSender(met[0], rank, said, tensors, store if rank == 0 else None)


def _described(model: Model) -> Any:
    """The description of what this rank holds, or why there is none."""
    try:
        held = holdings(model)
    except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for this one
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    names = [name for name, _ in parameters(model)]
    assert list(held.parameters) == names, "parameters come in the order of their description"
    return held
