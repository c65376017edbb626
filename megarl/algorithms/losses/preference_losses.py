"""Losses over pairs of a chosen and a rejected answer to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.losses.registry import Metrics, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


@policy_loss(
    "dpo",
    needs_old_log_probs=False,
    settings=("dpo_beta", "dpo_label_smoothing"),
    source="preferences",
    needs_advantages=False,
    needs_reference=True,
    whole_groups=True,
)
def dpo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Direct preference optimization (DPO, arXiv 2305.18290): -log sigmoid(beta (margin of chosen - margin of rejected)),
    where a margin is the sum over an answer's tokens of log_prob - reference log_prob. With label smoothing e (cDPO):
    (1 - e) times that, plus e times the same with the pair reversed.

    Both answers' tokens carry the pair's loss, so `seq_mean_token_mean` gives the mean over pairs.
    """
    assert inputs.reference_log_probs is not None
    margins = inputs.sequence_sums(inputs.log_probs - inputs.reference_log_probs)  # [2 pairs]: chosen, rejected, ...
    chosen, rejected = settings.dpo_beta * margins[::2], settings.dpo_beta * margins[1::2]
    ahead, smoothing = chosen - rejected, settings.dpo_label_smoothing
    # -log sigmoid(x) is softplus(-x), which `logaddexp` computes without overflow.
    zero = ahead.new_zeros(())
    loss = (1.0 - smoothing) * zero.logaddexp(-ahead) + smoothing * zero.logaddexp(ahead)

    def on_pairs(values: Tensor) -> Tensor:
        return inputs.on_tokens(values.repeat_interleave(2))

    metrics = {
        "actor/dpo_accuracy": (ahead > 0).to(ahead.dtype),
        "actor/dpo_margin": ahead,
        "actor/dpo_reward_chosen": chosen,
        "actor/dpo_reward_rejected": rejected,
    }
    return on_pairs(loss), {name: inputs.as_in_loss(on_pairs(values.detach())) for name, values in metrics.items()}
