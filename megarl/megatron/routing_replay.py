"""Routing replay: a mixture of experts sends each token where it was sent before.

Between the old-log-prob pass and the update the weights move, between the engine and the trainer the arithmetic
differs; a token whose router scores are nearly tied then goes to other experts, and its importance ratio jumps for
no reason that the loss can see. Replaying the earlier choice takes that jump away; the weights of the chosen experts
are still computed anew and carry gradients. R2 (the trainer's own choices) and R3 (the engine's) of
"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron import current_batch

UNKNOWN = -1
"""Stands for an expert that nobody recorded (padding, or the last token, which an engine never reads): the router
then chooses by itself."""


@dataclass
class Routing:
    """Where one micro batch's tokens were sent, as far as this rank's layers and rows go.

    Either recorded here: `recording` is set while routers fill `rows`. Or given for whole sequences by an engine:
    `tokens`, from which each layer's `rows` are cut when it first asks.
    """

    recording: bool = False
    tokens: torch.Tensor | None = None  # int16 [T, layers of the model, topk], at token index; UNKNOWN where not known
    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # layer number -> int16 [rows of this rank, topk]

    def of_layer(self, number: int, row_tokens: torch.Tensor) -> torch.Tensor:
        """Experts [rows, topk] of layer `number` (from 1), for rows that hold `row_tokens` [rows] (-1: padding)."""
        if number not in self.rows:
            assert self.tokens is not None, f"layer {number} was not recorded"
            experts = self.tokens[:, number - 1].to(row_tokens.device)
            self.rows[number] = experts[row_tokens].masked_fill(row_tokens[:, None] < 0, UNKNOWN)
        return self.rows[number]


class RouterReplay:
    """What a router asks for its choice, in place of top-k: Megatron's own interface for replay.

    Megatron's own RouterReplay holds one micro batch's choice a layer, and a queue of them for the backward pass
    that is emptied in another order under pipelining; here each micro batch brings its own.
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
        """Scores [rows, topk] and numbers [rows, topk] of the experts that each row of `scores` [rows, experts] goes to."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        stream = current_batch.current()
        if stream.routing is None:
            return values, chosen
        if stream.routing.recording:
            stream.routing.rows[self.layer_number] = chosen.to(torch.int16)
            return values, chosen
        before = stream.routing.of_layer(self.layer_number, _own_rows(stream.row_tokens)).long()
        chosen = torch.where(before == UNKNOWN, chosen, before)
        return scores.gather(1, chosen), chosen


def install(chunk: Any) -> None:
    """Let all routers of a model chunk record and replay."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = RouterReplay(module.layer_number)


def _own_rows(row_tokens: torch.Tensor) -> torch.Tensor:
    """The part of a context-parallel rank's rows that a router of this tensor-parallel rank sees: its sequence is cut."""
    parts = row_tokens.chunk(parallel_state.get_tensor_model_parallel_world_size())
    return parts[parallel_state.get_tensor_model_parallel_rank()]
