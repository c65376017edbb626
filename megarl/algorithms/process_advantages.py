"""Process rewards: of steps within a response. Where they lie in the vectors, and advantages that are made of them.

A token that the policy did not choose (a tool's answer) earns nothing: a step that ends there belongs to the last chosen
token before its end, or, where there is none, to the first.
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
    """The number of each step of a sample at the token that ends it; those of one token are added up. mask [L]: tokens
    that the policy chose. Returns float64 [L]."""
    vector, chosen = np.zeros(len(mask)), np.flatnonzero(mask)
    if steps and len(chosen):
        ends, numbers = zip(*steps, strict=True)
        np.add.at(vector, chosen[np.maximum(np.searchsorted(chosen, ends, side="right") - 1, 0)], numbers)
    return vector


def up_to(steps: Steps, mask: np.ndarray) -> np.ndarray:
    """As `placed`, each number at all tokens up to the one that ends the step."""
    return np.cumsum(placed(steps, mask)[::-1])[::-1]


def normalised_steps(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Each step's reward less the mean over all steps of its group, over their standard deviation + 1e-6 (with
    ``normalize_by_std``): float64 [S]. 0 in a group of one sample."""
    groups = outcomes.groups[outcomes.step_samples]
    steps = GroupStatistics.of(Outcomes(outcomes.step_rewards, groups, np.ones(len(groups))))
    centred = outcomes.step_rewards - steps.mean
    if settings.normalize_by_std:
        centred = centred / (steps.std + STD_EPS)
    return np.where(GroupStatistics.of(outcomes).size[outcomes.step_samples] > 1, centred, 0.0)


@advantage("grpo_process", settings=("normalize_by_std",), needs_siblings=True, of_steps=normalised_steps)
def grpo_process(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): (r - mean) / (std + 1e-6) of each
    step's reward over all steps of the group; a token's advantage is the sum of those of the steps that end at it or
    later. What the scorer gives the whole response (`score`, and shaping) is apart from that: its `grpo` advantage is
    added at every token, and is 0 where it is the same for all of the group, as without outcomes in the paper."""
    earned = np.bincount(outcomes.step_samples, weights=outcomes.step_rewards, minlength=len(outcomes.rewards))
    return grpo(replace(outcomes, rewards=outcomes.rewards - earned), settings)
