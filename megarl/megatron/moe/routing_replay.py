"""Routing replay: an MoE layer sends each token to the experts of an earlier pass.

The weights change between the old-log-prob pass and the update, and the arithmetic differs between engine and trainer.
A token with nearly tied router scores then goes to other experts, and its importance ratio jumps. Replaying the recorded
choice removes the jump; the weights of the chosen experts are still recomputed and carry gradients. R2 (the trainer's
choices) and R3 (the engine's choices) of "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron import current_batch
from megarl.megatron.moe.recorded_routing import UNKNOWN


class RouterReplay:
    """Replacement for a router's top-k, through Megatron's replay interface.

    Megatron's RouterReplay holds one micro batch per layer, and a queue for the backward pass that pipelining empties in
    another order; here each micro batch carries its recorded choices.
    """

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers [rows, topk] of the experts chosen for each row of `scores` [rows, experts]."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        stream = current_batch.current()
        if stream.routing is None:
            return values, chosen
        if stream.routing.recording:
            stream.routing.rows[self.layer_number] = chosen.to(torch.int16)
            return values, chosen
        before = stream.routing.of_layer(self.layer_number, _local_rows(stream.row_tokens)).long()
        chosen = torch.where(before == UNKNOWN, chosen, before)
        return scores.gather(1, chosen), chosen


def install(chunk: Any) -> None:
    """Make all routers of a model chunk record and replay."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = RouterReplay(module.layer_number)


def _local_rows(row_tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows of this tensor-parallel rank's routers: sequence parallel splits a context-parallel rank's rows."""

    parts = row_tokens.chunk(parallel_state.get_tensor_model_parallel_world_size())
    return parts[parallel_state.get_tensor_model_parallel_rank()]
