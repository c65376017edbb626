"""Per-token advantage estimators, computed on the ranks that hold the token vectors.

An estimator takes `TokenOutcomes` of a micro batch and the recipe's `AlgorithmConfig` and returns advantages [T].
Whitening over the whole batch (`whiten_advantages`) follows separately, since no rank holds the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megarl.algorithms.advantages import ADVANTAGES, AdvantageEstimator, TokenEstimator
from megarl.algorithms.inputs import TokenOutcomes
from megarl.algorithms.returns import returns_to_go
from megarl.recipe.algorithm import AlgorithmConfig, check_settings


def token_advantage(
    name: str, *, settings: tuple[str, ...] = (), **more: Any
) -> Callable[[TokenEstimator], TokenEstimator]:
    """Register an estimator under `name`, its value in a recipe's `algorithm.advantage`.

    Further arguments: fields of `AdvantageEstimator`.
    """
    check_settings(settings)

    def add(function: TokenEstimator) -> TokenEstimator:
        ADVANTAGES.register(name)(
            AdvantageEstimator(None, (*settings, "whiten_advantages"), of_tokens=function, **more)
        )
        return function

    return add


@token_advantage("reinforce_plus_plus", settings=("gamma",))
def reinforce_plus_plus(outcomes: TokenOutcomes, settings: AlgorithmConfig) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262): the discounted return-to-go of each token, step rewards and KL penalty included, with
    the batch mean as the only baseline (`whiten_advantages`). Tool output is skipped and not discounted."""
    return returns_to_go(
        outcomes.rewards, outcomes.mask, outcomes.lengths, gamma=settings.gamma, token_rewards=outcomes.token_rewards
    )


@token_advantage("on_policy_distillation", settings=("distill_max",), needs_kl_in_reward=True)
def on_policy_distillation(outcomes: TokenOutcomes, settings: AlgorithmConfig) -> np.ndarray:
    """On-policy distillation (Thinking Machines, 2025; MiniLLM, arXiv 2306.08543, without its later rewards): the advantage
    is the KL penalty of each token, -kl_coef (log p(policy) - log p(teacher)), between -`distill_max` and `distill_max`; outcomes and step rewards are
    not used."""
    assert outcomes.penalties is not None
    limit = np.inf if settings.distill_max is None else settings.distill_max
    return np.where(outcomes.mask, outcomes.penalties.clip(-limit, limit), 0.0)
