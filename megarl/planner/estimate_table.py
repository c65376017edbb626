"""An estimate as lines of the console, each at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from megarl.planner.plan import Estimate, Spread

_COLUMNS = 100


def estimate_lines(estimate: Estimate) -> list[str]:
    """A line a phase, the step, and what all of it stands on. Everything is estimated, and says so."""
    width = max(len(phase.name) for phase in estimate.phases)
    uncalibrated = estimate.uncalibrated
    raw = None if uncalibrated is None else {phase.name: phase.seconds for phase in uncalibrated.phases}
    lines = ["Estimated seconds of a step, past the first ones; without evaluation and checkpoints", ""]
    if uncalibrated is not None and raw is not None:
        raw["step"] = uncalibrated.seconds
        lines[0] += "; in brackets without the calibration"
    for phase in estimate.phases:
        beside = "beside the next ones, " if phase.name == "gen" and _overlaps(estimate) else ""
        lines.append(
            f"  {phase.name:<{width}} {seconds(phase.seconds):>9}{_raw(raw, phase.name)}  {beside}bound by {phase.bound}"
        )
    lines += [
        f"  {'step':<{width}} {seconds(estimate.seconds):>9}{_raw(raw, 'step')}  {estimate.tokens_per_second:,.0f} tokens/s, prompts and "
        "responses",
        f"  micro batches of a mini batch and data-parallel rank: {estimate.micro_batches}, of "
        f"{estimate.tokens_per_micro_batch:,.0f} tokens; bubble {estimate.bubble:.0%}",
        "",
        *assumptions(estimate),
    ]
    return lines


def assumptions(estimate: Estimate) -> list[str]:
    """What phases stand on, each once, behind the names of those that do."""
    of: dict[str, list[str]] = {}
    for phase in estimate.phases:
        for part in phase.assumed.split("; "):
            of.setdefault(part, []).append(phase.name)
    by_phases: dict[str, list[str]] = {}
    for part, names in of.items():
        by_phases.setdefault(", ".join(names), []).append(part)
    found = []
    for phases, said in by_phases.items():
        text = f"assumed for {phases}: {'; '.join(said)}"
        found += textwrap.wrap(text, _COLUMNS, initial_indent="- ", subsequent_indent="  ")
    return found


def seconds(value: float) -> str:
    """Three digits of it, in seconds."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value:.4f} s"


def _overlaps(estimate: Estimate) -> bool:
    return sum(phase.seconds for phase in estimate.phases) > estimate.seconds * (1 + 1e-9)


def _raw(raw: Mapping[str, float] | None, name: str) -> str:
    """The phase's seconds without a calibration, in brackets."""
    return "" if raw is None else f" {'(' + seconds(raw[name]) + ')' if name in raw else '':>11}"


def spread_lines(spread: Sequence[Spread], measured: bool) -> list[str]:
    """The range over published runs of such models, and a reminder that none of it was measured here."""
    if measured:
        return []
    if not spread:
        return [
            "No published run of such a model is known, and nothing was measured on this device: --calibration FILE applies rates."
        ]
    width = max(len(one.name) for one in spread)
    lines = [
        "Published runs of such models took longer than estimated. Scaled as they were: geometric mean, and range",
        *(
            f"  {one.name:<{width}} {seconds(one.typical):>9}  {seconds(one.low)} to {seconds(one.high)}, {one.runs} runs"
            for one in spread
        ),
    ]
    return [*lines, "Never measured: this layout on this device. --calibration FILE takes the place of the range."]
