"""Advantage estimators that give each token a number of its own, computed where the token vectors are.

One takes `TokenOutcomes` of a micro batch and the recipe's `AlgorithmConfig` and returns advantages [T]. Whitening over
the whole batch (`whiten_advantages`) comes after it, since no process sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.algorithms.advantages import ADVANTAGES, AdvantageEstimator
from megarl.algorithms.returns import returns_to_go
from megarl.recipe.algorithm import check_settings

if TYPE_CHECKING:
    from megarl.recipe.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class TokenOutcomes:
    """The samples of one micro batch, one after the other: B samples of T tokens together."""

    rewards: np.ndarray  # float64 [B]: outcomes, without what steps earned
    mask: np.ndarray  # bool [T]: tokens that the policy chose and the loss counts
    lengths: Sequence[int]  # [B]: they sum to T
    step_rewards: np.ndarray | None = None  # float64 [T]: of the steps that end at a token; None: no sample has any
    penalties: np.ndarray | None = (
        None  # float64 [T]: what the KL takes from it, with its sign; None: no KL in the reward
    )

    @property
    def token_rewards(self) -> np.ndarray | None:
        """What each token earns besides outcomes [T]; None: nothing."""
        return sum_of(self.step_rewards, self.penalties)


def sum_of(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """Of two vectors that may not be there."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


TokenEstimator = Callable[[TokenOutcomes, "AlgorithmConfig"], np.ndarray]


def token_advantage(
    name: str, *, settings: tuple[str, ...] = (), **more: Any
) -> Callable[[TokenEstimator], TokenEstimator]:
    """Register an estimator under `name`, the word a recipe's `algorithm.advantage` uses. Arguments are those of
    `AdvantageEstimator`."""
    check_settings(settings)

    def add(function: TokenEstimator) -> TokenEstimator:
        ADVANTAGES.register(name)(
            AdvantageEstimator(None, (*settings, "whiten_advantages"), of_tokens=function, **more)
        )
        return function

    return add


@token_advantage("reinforce_plus_plus", settings=("gamma",))
def reinforce_plus_plus(outcomes: TokenOutcomes, settings: AlgorithmConfig) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262): each token's discounted return to go, rewards of steps and KL penalty included, no
    baseline but the batch's mean (`whiten_advantages`). Tokens between turns take no part and no time."""
    return returns_to_go(
        outcomes.rewards, outcomes.mask, outcomes.lengths, gamma=settings.gamma, token_rewards=outcomes.token_rewards
    )


@token_advantage("on_policy_distillation", needs_kl_in_reward=True)
def on_policy_distillation(outcomes: TokenOutcomes, settings: AlgorithmConfig) -> np.ndarray:
    """On-policy distillation (Thinking Machines, 2025; MiniLLM, arXiv 2306.08543, without its later rewards): what the KL
    takes from each token alone, -kl_coef (log p(policy) - log p(teacher)): neither outcomes nor rewards of steps."""
    assert outcomes.penalties is not None
    return np.where(outcomes.mask, outcomes.penalties, 0.0)
