"""Process rewards (rewards of steps within a response): their position in token vectors, and advantages from them.

Excluded tokens (tool output) get no reward: a step that ends at such a token counts at the last loss token before it, or
at the first loss token if none precedes it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.algorithms.advantages import STD_EPS, GroupStatistics, advantage, grpo
from megarl.algorithms.inputs import Outcomes
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.types import Steps


def step_rewards_per_token(steps: Steps, mask: np.ndarray) -> np.ndarray:
    """Return, for each token, the sum of the rewards (or advantages) of the steps that end there: float64 [L].

    mask [L]: the loss tokens.
    """
    vector, indices = np.zeros(len(mask)), np.flatnonzero(mask)
    if steps and len(indices):
        ends, numbers = zip(*steps, strict=True)
        np.add.at(vector, indices[np.maximum(np.searchsorted(indices, ends, side="right") - 1, 0)], numbers)
    return vector


def step_returns(steps: Steps, mask: np.ndarray) -> np.ndarray:
    """Return, for each token, the sum over the steps that end there or later: float64 [L]. See `step_rewards_per_token`."""
    return np.cumsum(step_rewards_per_token(steps, mask)[::-1])[::-1]


def normalized_steps(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Return (step reward - group mean) / (group std + 1e-6), over all steps of the group: float64 [S].

    Without ``normalize_by_std`` no division. 0 in a group of one sample.
    """
    groups = outcomes.groups[outcomes.step_samples]
    steps = GroupStatistics.of(Outcomes(outcomes.step_rewards, groups, np.ones(len(groups))))
    centred = outcomes.step_rewards - steps.mean
    if settings.normalize_by_std:
        centred = centred / (steps.std + STD_EPS)
    return np.where(GroupStatistics.of(outcomes).size[outcomes.step_samples] > 1, centred, 0.0)


@advantage("grpo_process", settings=("normalize_by_std",), needs_siblings=True, of_steps=normalized_steps)
def grpo_process(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): (r - mean) / (std + 1e-6) of each
    step's reward over all steps of the group; a token's advantage is the sum over the steps that end at it or later. The
    rest of the reward (`score`, and shaping) has a separate `grpo` advantage, which is added at every token. It is 0 if that
    reward is equal within the group; the estimator is then the paper's."""
    step_totals = np.bincount(outcomes.step_samples, weights=outcomes.step_rewards, minlength=len(outcomes.rewards))
    return grpo(replace(outcomes, rewards=outcomes.rewards - step_totals), settings)
