"""What happens to outcome rewards before advantages: DAPO's overlong treatment and group filter (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megarl.types import Group, Sample


def overlong_penalty(response_lengths: np.ndarray, max_length: int, buffer: int, factor: float) -> np.ndarray:
    """Soft overlong punishment, equation 13: [B] lengths -> [B] numbers <= 0 to add to the reward.

    0 up to max_length - buffer, then falling linearly to -factor at max_length. buffer 0: no punishment.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer == 0:
        return np.zeros_like(lengths)
    excess = lengths - (max_length - buffer)
    return -factor * np.clip(excess / buffer, 0.0, 1.0)


def has_spread(samples: Sequence[Sample], metric: str) -> bool:
    """Whether a group's samples differ in `metric` ("reward" or a reward part): only then is there a gradient.

    Raises ValueError where the metric is no part of the reward.
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
    """Overlong filtering: a truncated sample says nothing about how its answer would have ended."""
    return not (overlong_filter and sample.truncated)


def group_numbers(groups: Sequence[Group]) -> np.ndarray:
    """Group of each sample of a batch, in the batch's order: int64 [B]."""
    return np.repeat([group.number for group in groups], [len(group.samples) for group in groups])
