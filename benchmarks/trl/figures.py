"""Figures of one run from its records, their medians, and the table: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from benchmarks.trl.process_tree import Usage

SKIPPED = 2  # first steps of a run, which are not steady


@dataclass(frozen=True)
class Figures:
    """Figures of one run, or medians over runs.

    step, step_cpu: wall and CPU seconds of a step, medians over the steady steps; tokens: trained response tokens per
    second; peak: MiB; first_sample, first_batch: seconds from the command until the first sample, the first batch is scored;
    first_cpu: CPU seconds until the first batch is scored.
    """

    step: float
    step_cpu: float
    tokens: float
    peak: float
    first_sample: float
    first_batch: float
    first_cpu: float


def read_record(text: str) -> list[tuple[float, float]]:
    """Return (seconds, reward) of each scored sample, by time, from the lines that `job.record` has written."""
    lines = (line.split() for line in text.splitlines())
    return sorted((float(moment), float(reward)) for moment, reward in lines)


def batches(samples: Sequence[tuple[float, float]], size: int) -> list[list[tuple[float, float]]]:
    """Divide the samples into batches of `size`, one for each step.

    Raises ValueError if the last batch is not complete: a sample was scored twice, or the run has ended early.
    """
    if not samples or len(samples) % size:
        raise ValueError(f"{len(samples)} samples were scored, not a multiple of the {size} samples of a step")
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def figures_of(steps: Sequence[Sequence[tuple[float, float]]], lengths: Sequence[float], usage: Usage) -> Figures:
    """Return the figures of a run.

    steps: of `batches`; lengths: mean response tokens of each step. A step begins when the last sample of its batch is scored, and
    ends when the last sample of the next batch is: an update, the new weights, sampling. So the last update is not counted.

    Raises ValueError if there are fewer than `SKIPPED` + 2 steps, or not a length for each.
    """
    if len(steps) < SKIPPED + 2:
        raise ValueError(f"{len(steps)} steps have no steady step: --steps must be at least {SKIPPED + 2}")
    if len(lengths) != len(steps):
        raise ValueError(f"the run has {len(steps)} steps, but lengths of {len(lengths)}")
    ends = [batch[-1][0] for batch in steps]
    steady = range(SKIPPED, len(steps) - 1)
    seconds = [ends[step + 1] - ends[step] for step in steady]
    cpu = [usage.cpu_at(ends[step + 1]) - usage.cpu_at(ends[step]) for step in steady]
    tokens = [lengths[step] * len(steps[step]) for step in steady]
    first = [steps[0][0][0] - usage.begun, ends[0] - usage.begun, usage.cpu_at(ends[0])]
    return Figures(statistics.median(seconds), statistics.median(cpu), sum(tokens) / sum(seconds), usage.peak, *first)


def mean_rewards(steps: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the mean reward of each step."""
    return [statistics.fmean(reward for _, reward in batch) for batch in steps]


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*(statistics.median(getattr(run, each.name) for run in runs) for each in fields(Figures)))


def ratio(runs: Sequence[Figures], baseline: Sequence[Figures]) -> Figures:
    """Return, for each figure, the median ratio of `runs` to `baseline` in the same round."""
    pairs = list(zip(runs, baseline, strict=True))
    return medians(
        [Figures(*(getattr(a, each.name) / getattr(b, each.name) for each in fields(Figures))) for a, b in pairs]
    )


HEAD = """| | step, s | CPU s per step | trained tokens/s | peak memory, MiB | first sample, s | first batch, s | first batch, CPU s |
|---|---|---|---|---|---|---|---|"""


def table(runs: Mapping[str, Sequence[Figures]], reference: str) -> str:
    """Return the Markdown table: ratios to `reference` first, then the medians."""
    lines = [HEAD]
    for name, figures in runs.items():
        if name != reference:
            values = (f"{getattr(ratio(figures, runs[reference]), each.name):.2f}" for each in fields(Figures))
            lines.append(f"| {name} / {reference} | {' | '.join(values)} |")
    for name, figures in runs.items():
        middle = medians(figures)
        cells = [f"{middle.step:.2f}", f"{middle.step_cpu:.2f}", f"{middle.tokens:.0f}", f"{middle.peak:.0f}"]
        cells += [f"{middle.first_sample:.1f}", f"{middle.first_batch:.1f}", f"{middle.first_cpu:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rewards_table(rewards: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return the Markdown table of the mean reward of each step: mean, and standard deviation between the runs."""
    steps = max(len(run) for runs in rewards.values() for run in runs)
    shown = sorted({0, steps - 1, *range(0, steps, max(1, steps // 8))})
    lines = [
        "| mean reward of step | " + " | ".join(str(step + 1) for step in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, runs in rewards.items():
        values = [[run[step] for run in runs] for step in shown]
        cells = [f"{statistics.fmean(each):.3f}" for each in values]
        if len(runs) > 1:
            cells = [f"{cell} ± {statistics.stdev(each):.3f}" for cell, each in zip(cells, values, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
