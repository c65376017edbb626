"""What only values or other ranks could tell a rank that computes without either, assumed in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher

BALANCED = "Every expert is sent as many tokens as any other, and every rank has a micro batch of the same size."


def stand_ins(config: Any) -> dict[Any, Callable[..., torch.Tensor]]:
    """For `Live`: operations whose output's size depends on values.

    The only one is Megatron's choice of tokens by a routing map [experts, tokens]: each token goes to `topk` experts.
    """

    def masked_select(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return values.new_empty(chosen.shape[1] * config.moe_router_topk)

    return {torch.ops.aten.masked_select.default: masked_select}


def install(arriving: list[int]) -> None:
    """Put the assumptions in place, process-wide. `arriving`: the shape of what pipeline stages send each other."""
    P2PCommunicator._communicate_shapes = lambda *_, **__: (arriving, arriving)
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    @functools.wraps(preprocess)
    def preprocess_balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        tokens, experts = routing_map.shape
        return preprocess(self, _BalancedMap(tokens, experts, self.config.moe_router_topk))

    @functools.wraps(gather)
    def gather_equal(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_floating_point():  # counts of a balanced map, which all ranks have
            return tensor.repeat(group.size())
        return gather(tensor, *args, group=group, **kwargs)

    dispatcher.preprocess = preprocess_balanced
    token_dispatcher.gather_from_sequence_parallel_region = gather_equal


class _BalancedMap:
    """As much of a routing map [tokens, experts] as Megatron's dispatcher asks for; its counts are real, on the host."""

    def __init__(self, tokens: int, experts: int, topk: int) -> None:
        self.shape, self.topk = (tokens, experts), topk

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def sum(self, dim: int) -> torch.Tensor:
        assert dim == 0, "tokens of each expert"
        tokens, experts = self.shape
        each, left = divmod(tokens * self.topk, experts)
        return torch.tensor([each + (number < left) for number in range(experts)])
