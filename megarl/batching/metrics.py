"""Metrics of a planned batch: lengths, rewards, and how full and even its micro batches are. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.batching.packing import Plan, imbalance, share
from megarl.types import Metrics, Sample


def mean_max_min(name: str, values: Sequence[float] | np.ndarray) -> Metrics:
    """Return mean, maximum and minimum as metrics."""
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def length_metrics(samples: Sequence[Sample], loss_tokens: np.ndarray) -> Metrics:
    """Return metrics of the batch's lengths (tokens), under verl's names."""
    return {
        **mean_max_min("response_length", [sample.response_length for sample in samples]),
        **mean_max_min("prompt_length", [sample.prompt_length for sample in samples]),
        "response_length/clip_ratio": float(np.mean([sample.truncated for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.length for sample in samples)),
        "actor/loss_tokens": float(loss_tokens.sum()),
    }


def reward_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return metrics of the batch's rewards and reward parts."""
    metrics = mean_max_min("critic/rewards", [sample.reward for sample in samples])
    if any("steps" in sample.reward_parts for sample in samples):
        metrics.update(mean_max_min("critic/step_count", [len(sample.steps) for sample in samples]))
    for part in sorted({name for sample in samples for name in sample.reward_parts}):
        metrics.update(mean_max_min(f"critic/score/{part}", [sample.reward_parts.get(part, 0.0) for sample in samples]))
    return metrics


@dataclass
class PackingMetrics:
    """Fill and balance of the micro batches of each mini batch."""

    counts: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)

    def add(self, plan: Plan, lengths: np.ndarray, costs: np.ndarray, max_tokens: int) -> None:
        self.counts.append(len(plan[0]))
        self.shares.append(share(plan, lengths, max_tokens))
        self.imbalances.append(imbalance(plan, costs))

    def metrics(self) -> Metrics:
        return {
            "actor/micro_batches": float(sum(self.counts)),
            "perf/micro_batch_share": float(np.average(self.shares, weights=self.counts)),
            "perf/micro_batch_imbalance": max(self.imbalances),
        }
