"""Rewards before advantages: overlong penalty and filter, the test of dynamic sampling (`has_spread`), KL penalty.

Penalty, filter and test: DAPO, arXiv 2503.14476. `rollout/source_engines.py` applies the test when a group arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import Outcomes
from megarl.types import TOO_SLOW

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


def reward_part(sample: Sample, name: str, key: str) -> float:
    """Return a part of a sample's reward; 0 if its scorer was too slow to report it. `key`: the setting that names the part.

    Raises ValueError if the sample's scorer does not report the part.
    """
    parts = sample.reward_parts
    if name in parts:
        return parts[name]
    labels = name.split("/")[:-1]  # several scorers: the parts of each have a label
    if any(parts.get("/".join([*labels[:count], TOO_SLOW])) for count in range(len(labels) + 1)):
        return 0.0
    raise ValueError(
        f"{key} names '{name}', which the reward does not report. Its parts: {', '.join(sorted(parts)) or 'none'}. Name a "
        "part that every scorer of the data reports for every response, or let the scorer report it (0 where it does not apply)"
    )


def has_spread(samples: Sequence[Sample], metric: str) -> bool:
    """Return whether a group's samples differ in `metric` ("reward" or a reward part): only then is there a gradient.

    Raises ValueError as `reward_part` does.
    """
    if metric == "reward":
        values = [sample.reward for sample in samples]
    else:
        values = [reward_part(sample, metric, "algorithm.dynamic_sampling.metric") for sample in samples]
    return max(values) > min(values)


def counts_in_loss(sample: Sample, overlong_filter: bool) -> bool:
    """Return False for a truncated sample under overlong filtering: its reward does not reflect a finished answer."""
    return not (overlong_filter and sample.truncated)


def group_numbers(groups: Sequence[Group]) -> np.ndarray:
    """Return the group number of each sample of a batch, int64 [B]."""
    return np.repeat([group.number for group in groups], [len(group.samples) for group in groups])
