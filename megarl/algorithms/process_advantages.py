"""Process rewards (rewards of steps within a response): their position in token vectors, and advantages from them.

A token that the policy did not choose (tool output) gets no reward: a step that ends there moves to the last chosen token
before its end, or to the first chosen token if none precedes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.advantages import STD_EPS, GroupStatistics, advantage, grpo
from megarl.algorithms.inputs import Outcomes

if TYPE_CHECKING:
    from megarl.recipe.algorithm import AlgorithmConfig
    from megarl.types import Steps


def placed(steps: Steps, mask: np.ndarray) -> np.ndarray:
    """Return each step's number at the token that ends the step, summed per token: float64 [L].

    mask [L]: tokens that the policy chose.
    """
    vector, chosen = np.zeros(len(mask)), np.flatnonzero(mask)
    if steps and len(chosen):
        ends, numbers = zip(*steps, strict=True)
        np.add.at(vector, chosen[np.maximum(np.searchsorted(chosen, ends, side="right") - 1, 0)], numbers)
    return vector


def up_to(steps: Steps, mask: np.ndarray) -> np.ndarray:
    """Return, at each token, the sum of the numbers of steps that end there or later: float64 [L]; see `placed`."""
    return np.cumsum(placed(steps, mask)[::-1])[::-1]


def normalised_steps(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Return (step reward - group mean) / (group std + 1e-6), over all steps of the group: float64 [S].

    Without ``normalize_by_std`` no division. 0 in a group of one sample.
    """
    groups = outcomes.groups[outcomes.step_samples]
    steps = GroupStatistics.of(Outcomes(outcomes.step_rewards, groups, np.ones(len(groups))))
    centred = outcomes.step_rewards - steps.mean
    if settings.normalize_by_std:
        centred = centred / (steps.std + STD_EPS)
    return np.where(GroupStatistics.of(outcomes).size[outcomes.step_samples] > 1, centred, 0.0)


@advantage("grpo_process", settings=("normalize_by_std",), needs_siblings=True, of_steps=normalised_steps)
def grpo_process(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): (r - mean) / (std + 1e-6) of each
    step's reward over all steps of the group; a token's advantage is the sum over the steps that end at it or later. The
    reward of the whole response (`score`, and shaping) is separate: its `grpo` advantage is added at every token, and is 0
    if it is equal within the group, as without outcomes in the paper."""
    step_totals = np.bincount(outcomes.step_samples, weights=outcomes.step_rewards, minlength=len(outcomes.rewards))
    return grpo(replace(outcomes, rewards=outcomes.rewards - step_totals), settings)
