"""Routing by a softmax over all experts, with a bias for the choice, as ERNIE 4.5 has it.

megatron-core 0.16.1 has routing biases with a sigmoid only: its TransformerConfig refuses `moe_router_enable_expert_bias` with
`moe_router_score_function: "softmax"`, and `topk_routing_with_score_function` ignores the bias there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

_SMALLEST = 1e-12  # least sum of a token's weights; transformers: `moe_norm_min`


class BiasedSoftmaxRouter(TopKRouter):
    """Megatron's router with softmax scores: a bias takes part in the choice, weights are scores of the chosen experts,
    divided by their sum."""

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        """`config`: TransformerConfig with a sigmoid and a bias, which make Megatron's router hold the bias.

        Raises ValueError for Megatron's fused router, which this one replaces.
        """
        if config.moe_router_fusion:
            raise ValueError(
                "megatron.extra.moe_router_fusion=true: the fused router has no softmax with a bias, which this model's "
                "experts are chosen by. Leave it out."
            )
        super().__init__(config, *arguments, **more)
        self.score_function = "softmax"  # of the balance loss too: router_losses.py

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and choice, bool, [tokens, experts] for `logits` [s, b, experts]."""
        assert padding_mask is None, "megarl's streams have no padding"
        logits = logits.flatten(0, -2)
        scores = logits.softmax(-1, dtype=torch.float32)
        chosen = self._choose(scores.detach() + self.expert_bias)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=_SMALLEST)
        probs = torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits)
        choice = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        self._apply_expert_bias(choice)  # counts tokens, for moe_router_bias_update_rate
        return probs, choice

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the numbers [tokens, topk] of each token's experts; recorded ones in a replay."""
        if self.router_replay is None:
            return _largest(scores, self.topk)[1]
        chosen: torch.Tensor = self.router_replay.get_replay_topk(scores, self.topk, default_compute_topk=_largest)[1]
        return chosen


def _largest(scores: torch.Tensor, topk: int, **_groups: None) -> tuple[torch.Tensor, torch.Tensor]:
    values, chosen = scores.topk(topk, dim=1)
    return values, chosen


def install(layers: list[Any]) -> None:
    """Make the mixtures of experts in the specs of a block's `layers` route with this router."""
    for layer in layers:
        submodules = layer.submodules.mlp.submodules
        if hasattr(submodules, "router"):
            submodules.router = BiasedSoftmaxRouter
