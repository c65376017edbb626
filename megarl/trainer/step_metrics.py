"""Metrics of a step: updates, speed, staleness."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algorithms.spikes import GradNorms
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.observe.log import RunLog
from megarl.types import Group, Metrics, Sample

MEMORY = "perf/max_memory_allocated_gb"
_SHOWN = 2  # updates in a notice


def log_update(
    log: RunLog, skipped: SkippedSteps, step: int, role: str, per_rank: Sequence[list[Metrics] | None]
) -> Metrics:
    """Log the metrics of a step's updates, report spikes and skipped ones, count the step if all were skipped, and return the
    metrics.

    The step's memory is the maximum over actor and critic. per_rank, role: see `combine_updates`.
    """
    metrics, norms = combine_updates(per_rank, role), skipped.norms[role]
    updates = next(part for part in per_rank if part is not None)
    unusual = unusual_updates(updates, role, norms)
    if norms.config.on_spike is not None:
        metrics[f"{role}/spikes"] = float(sum(update.is_spike for update in unusual))
    if unusual:
        more = f"; and {len(unusual) - _SHOWN} more" if len(unusual) > _SHOWN else ""
        text = f"step {step}: {'; '.join(map(str, unusual[:_SHOWN]))}{more}. {skipped.repetition.advice(step)}"
        log.warn(text, "update")
    causes = [f"{role}/grad_norm was {update.excess}" for update in unusual if not update.applied]
    overflows = int(metrics.get(f"{role}/overflows", 0))
    if overflows < len(updates):  # while the loss scale falls, nothing is learned and nothing is wrong
        all_skipped = len(causes) == len(updates) - overflows
        skipped.note(role, step, " and ".join(dict.fromkeys(causes)) if all_skipped else None)
    log.add({**metrics, MEMORY: max(metrics[MEMORY], log.pending().get(MEMORY, 0.0))})
    return metrics


@dataclass(frozen=True)
class UnusualUpdate:
    """An update that was skipped, or is a spike. excess: nan, inf, or how far its norm is above the norms before it."""

    name: str
    norm: float
    applied: bool
    excess: str

    @property
    def is_spike(self) -> bool:
        return math.isfinite(self.norm)

    def __str__(self) -> str:
        fate = "was applied" if self.applied else "was skipped, and left the weights unchanged"
        norm = f" {self.norm:.4g} is" if self.is_spike else " is"
        return f"{self.name} {fate}: its gradient norm{norm} {self.excess}"


def unusual_updates(updates: Sequence[Metrics], role: str, norms: GradNorms) -> list[UnusualUpdate]:
    """Return the unusual ones of a step's `updates`, and add the norms of all applied ones to `norms`.

    Each update is compared with those before it. updates: the metrics of each. Overflows at a loss scale that can fall are usual.
    """
    unusual = []
    for number, update in enumerate(updates, start=1):
        if update.get(f"{role}/overflows"):
            continue
        norm, applied = update[f"{role}/grad_norm"], not update[f"{role}/skipped_updates"]
        if not applied or norm > norms.limit:
            excess, name = str(norm), f"update {number} of {len(updates)} of the {role}"
            if math.isfinite(norm):
                factor = f"{norms.config.spike_factor:g} times the median {norms.median:.4g} of the {len(norms)} updates before"
                excess = f"above {factor} (train.spike_factor)"
            unusual.append(UnusualUpdate(name, norm, applied, excess))
        if applied:
            norms.add(norm)
    return unusual


def log_speed(log: RunLog, name: str, phase: str, flops: float, devices: int, peak: float | None) -> None:
    """Log the speed of `devices` devices that computed `flops` in the `phase` that has just ended. 0 FLOPs: unknown, no log.

    peak: FLOP/s of a device; None: unknown.
    """
    if flops:
        seconds = log.pending()[f"timing_s/{phase}"]
        log.add(speed(name, flops / seconds / devices, peak))


def combine_updates(per_rank: Sequence[list[Metrics] | None], role: str) -> Metrics:
    """Combine the metrics of a step's mini batches: means, except the last learning rate and loss scale, and the sums of skipped
    updates and overflows. The mean of the gradient norms leaves overflows out.

    per_rank: each rank's metrics per mini batch, None off the reporting ranks. role: "actor" or "critic".
    """
    steps = next(part for part in per_rank if part is not None)
    metrics = {name: float(np.mean([step[name] for step in steps if name in step])) for name in steps[-1]}
    norm, overflows = f"{role}/grad_norm", f"{role}/overflows"
    del metrics[norm]
    if norms := [step[norm] for step in steps if not step.get(overflows)]:
        metrics[norm] = float(np.mean(norms))
    last = {name: steps[-1][name] for name in (f"{role}/lr", f"{role}/loss_scale") if name in steps[-1]}
    sums = {
        name: sum(step[name] for step in steps) for name in (f"{role}/skipped_updates", overflows) if name in metrics
    }
    return {**metrics, **last, **sums}


def speed(name: str, flops_per_second: float, peak: float | None) -> Metrics:
    """Return a device's model TFLOP/s, and its MFU if `peak` (FLOP/s) is not None."""
    metrics = {f"perf/tflops_per_device/{name}": flops_per_second / 1e12}
    return metrics if peak is None else {**metrics, f"perf/mfu/{name}": flops_per_second / peak}


def staleness(groups: Sequence[Group], version: int) -> Metrics:
    """Return metrics of the lag: how many versions the response tokens are behind the policy of `version`, which trains on them."""
    samples = [sample for group in groups for sample in group.samples]
    lags = [version - span.version for sample in samples for span in sample.spans]
    tokens = [count for sample in samples for count in tokens_of_spans(sample)]
    return {
        "rollout/staleness_mean": float(np.average(lags, weights=tokens)) if sum(tokens) else float(np.mean(lags)),
        "rollout/staleness_max": float(np.max(lags)),
        "rollout/spans_mean": len(lags) / len(samples),
    }


def tokens_of_spans(sample: Sample) -> list[int]:
    """Return the number of response tokens in each span of a sample."""
    starts = [*(span.start for span in sample.spans), sample.response_length]
    return [end - start for start, end in itertools.pairwise(starts)]
