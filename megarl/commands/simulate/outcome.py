"""Figures of a simulated run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.errors import InputError


@dataclass(frozen=True)
class StepRecord:
    """One simulated step. Seconds, tokens and versions; sums of all engines count from the begin of the run."""

    end: float
    responses: int  # tokens of responses
    tokens: float  # tokens of responses and prompts
    groups: int  # trained
    tried: int  # groups of the batch before the filter
    unused: int  # finished groups that no batch takes
    missing: int  # groups short of a whole batch, at the limit of dynamic sampling
    waited: float  # of the trainers, for a batch or for a drain
    training: float
    weight_sync: float
    lag: float  # sum over the tokens of responses
    max_lag: int
    busy: float  # seconds of decoding and prefill, sum of all engines
    request_seconds: float  # integral of the running requests, sum of all engines
    recomputed: float  # tokens of recomputed KV caches, sum of all engines


@dataclass(frozen=True)
class Outcome:
    """Means over the measured steps; seconds, tokens and versions."""

    step_seconds: float
    tokens_per_second: float  # trained, prompts included
    waited: float  # per step: trainers wait for a batch or a drain
    training: float  # per step
    weight_sync: float  # per step
    engines_idle: float  # share of the time in which an engine neither decodes, prefills nor takes weights
    trainers_idle: float  # share of the time in which trainers wait
    running: float  # requests of an engine
    lag_mean: float  # of a trained token
    lag_max: int
    recomputed: float  # tokens of KV caches per step
    trained_length: float
    sampled_length: float  # of all admitted groups
    pending_samples: int  # most finished samples that were not trained on
    pending_tokens: float  # most tokens of these, prompts included
    tried: float = 1.0  # groups sampled per trained group
    unused: float = 0.0  # share of the sampled groups that no batch takes
    missing: float = 0.0  # share of the groups of whole batches, at the limit of dynamic sampling

    @property
    def length_bias(self) -> float:
        """Relative difference of the trained from the sampled mean length."""
        return self.trained_length / self.sampled_length - 1


def outcome(
    records: Sequence[StepRecord],
    warmup: int,
    engines: int,
    *,
    samples: int,
    sampled_length: float,
    pending: tuple[int, float],
) -> Outcome:
    """Return the figures of `records` after the first `warmup` steps. `samples`: per group; `pending`: (samples, tokens).

    Raises InputError if no group was trained on.
    """
    first, last, measured = records[warmup - 1] if warmup else None, records[-1], records[warmup:]
    steps, seconds = len(measured), last.end - (first.end if first else 0.0)
    synced = sum(record.weight_sync for record in measured)
    busy = last.busy - (first.busy if first else 0.0)
    running = last.request_seconds - (first.request_seconds if first else 0.0)
    responses = sum(record.responses for record in measured)
    waited = sum(record.waited for record in measured)
    groups, unused, missing = (
        sum(getattr(record, name) for record in measured) for name in ("groups", "unused", "missing")
    )
    if not groups:
        raise InputError(
            f"no group passed the filter in {steps} simulated steps. Give a smaller --filtered, or raise "
            "algorithm.dynamic_sampling.max_attempts."
        )
    sampled = sum(record.tried for record in measured) + unused
    return Outcome(
        step_seconds=seconds / steps,
        tokens_per_second=sum(record.tokens for record in measured) / seconds,
        waited=waited / steps,
        training=sum(record.training for record in measured) / steps,
        weight_sync=synced / steps,
        engines_idle=max(0.0, 1 - (busy / engines + synced) / seconds),
        trainers_idle=waited / seconds,
        running=running / (engines * seconds),
        lag_mean=max(0.0, sum(record.lag for record in measured) / responses),  # rounding makes it negative
        lag_max=max(record.max_lag for record in measured),
        recomputed=(last.recomputed - (first.recomputed if first else 0.0)) / steps,
        trained_length=responses / (groups * samples),
        sampled_length=sampled_length,
        pending_samples=pending[0],
        pending_tokens=pending[1],
        tried=sampled / groups,
        unused=unused / sampled,
        missing=missing / (groups + missing),
    )
