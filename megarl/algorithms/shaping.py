"""Rewards before advantages: overlong penalty and filter, group filter by equal rewards (DAPO, arXiv 2503.14476), KL penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import Outcomes

if TYPE_CHECKING:
    from megarl.recipe.algorithm import OverlongConfig
    from megarl.types import Group, Sample


def overlong_penalty(response_lengths: np.ndarray, max_length: int, buffer: int, factor: float) -> np.ndarray:
    """Return the soft overlong punishment (equation 13): lengths [B] (tokens) -> [B] numbers <= 0 to add to the reward.

    0 up to max_length - buffer, then falling linearly to -factor at max_length. buffer 0: no penalty.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer == 0:
        return np.zeros_like(lengths)
    excess = lengths - (max_length - buffer)
    return -factor * np.clip(excess / buffer, 0.0, 1.0)


def add_overlong_penalty(group: Group, overlong: OverlongConfig, max_length: int) -> None:
    """Add `overlong_penalty` to the reward of each sample of `group`, its greedy sample included."""
    if not overlong.penalty_buffer:
        return
    samples = [*group.samples, *([group.greedy] if group.greedy is not None else [])]
    lengths = np.array([sample.response_length for sample in samples])
    penalties = overlong_penalty(lengths, max_length, overlong.penalty_buffer, overlong.penalty_factor)
    for sample, penalty in zip(samples, penalties, strict=True):
        sample.reward_parts["overlong_penalty"] = float(penalty)
        sample.reward += float(penalty)


def subtract_kl(outcomes: Outcomes, kl: np.ndarray, weight: float) -> Outcomes:
    """Subtract `weight` times each sample's `kl` [B], summed over its tokens, from its reward (`algorithm.kl_in_reward`)."""
    return replace(outcomes, rewards=outcomes.rewards - weight * kl)


def kl_penalties(kl: Sequence[np.ndarray], weight: float) -> np.ndarray:
    """Return the reward of each token for its KL, -`weight` times `kl` of each sample in turn: float64 [T]."""
    return -weight * np.concatenate(kl).astype(np.float64)


def has_spread(samples: Sequence[Sample], metric: str) -> bool:
    """Return whether a group's samples differ in `metric` ("reward" or a reward part): only then is there a gradient.

    Raises ValueError if the reward does not report the metric.
    """
    if metric == "reward":
        values = [sample.reward for sample in samples]
    else:
        missing = [sample for sample in samples if metric not in sample.reward_parts]
        if missing:
            parts = ", ".join(sorted(missing[0].reward_parts)) or "none"
            raise ValueError(
                f"algorithm.dynamic_sampling.metric is '{metric}', which the reward does not report. "
                f"Use 'reward' or one of its parts: {parts}."
            )
        values = [sample.reward_parts[metric] for sample in samples]
    return max(values) > min(values)


def counts_in_loss(sample: Sample, overlong_filter: bool) -> bool:
    """Return False for a truncated sample under overlong filtering: its reward does not reflect a finished answer."""
    return not (overlong_filter and sample.truncated)


def group_numbers(groups: Sequence[Group]) -> np.ndarray:
    """Return the group number of each sample of a batch, int64 [B]."""
    return np.repeat([group.number for group in groups], [len(group.samples) for group in groups])
