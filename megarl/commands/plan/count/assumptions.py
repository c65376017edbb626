"""Stand-ins for results that depend on values or on other ranks, for a process that has neither."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher


def stand_ins(config: Any) -> dict[Any, Callable[..., torch.Tensor]]:
    """Return replacements, for `MemoryCounter`, of operations with an output size that depends on values.

    The only one is Megatron's token selection by a routing map [experts, tokens]: each token goes to `topk` experts.
    """

    def masked_select(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return values.new_empty(chosen.shape[1] * config.moe_router_topk)

    return {torch.ops.aten.masked_select.default: masked_select}


def install(arriving: list[int]) -> None:
    """Patch Megatron process-wide. `arriving`: shape of the hidden states between pipeline stages."""
    P2PCommunicator._communicate_shapes = lambda *_, **__: (arriving, arriving)
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    @functools.wraps(preprocess)
    def preprocess_balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        tokens, experts = routing_map.shape
        return preprocess(self, _BalancedMap(tokens, experts, self.config.moe_router_topk))

    @functools.wraps(gather)
    def gather_equal(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_floating_point():  # token counts of a balanced map, equal on all ranks
            return tensor.repeat(group.size())
        return gather(tensor, *args, group=group, **kwargs)

    dispatcher.preprocess = preprocess_balanced
    token_dispatcher.gather_from_sequence_parallel_region = gather_equal


class _BalancedMap:
    """The part of a routing map [tokens, experts] that Megatron's dispatcher reads; its counts are on the host."""

    def __init__(self, tokens: int, experts: int, topk: int) -> None:
        self.shape, self.topk = (tokens, experts), topk

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def sum(self, dim: int) -> torch.Tensor:
        assert dim == 0, "tokens of each expert"
        tokens, experts = self.shape
        each, left = divmod(tokens * self.topk, experts)
        return torch.tensor([each + (number < left) for number in range(experts)])
