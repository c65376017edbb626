"""Range of an estimate from published runs: measured / estimated seconds of such runs, applied to its phases. Pure.

The ratios are in published_ratios.yaml, which `python -m docs.generate.planner` writes from benchmarks/published.py; a test
compares them. If only the step of a run was published, its ratio counts for each phase.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megarl.commands.plan.count.types import Estimate, PhaseTime, Spread

RATIOS = Path(__file__).with_name("published_ratios.yaml")
STEP = "step"


@dataclass(frozen=True)
class Ratios:
    """Measured / estimated seconds of one published run, by phase; only `step` if no phases were published."""

    run: str
    experts: bool  # a mixture of experts
    of: Mapping[str, float] = field(hash=False)
    model: str = ""  # a name of megarl/model_configs


@functools.cache
def published_ratios() -> tuple[Ratios, ...]:
    """Read the ratios from the package's file."""
    content = yaml.safe_load(RATIOS.read_text(encoding="utf-8"))
    return tuple(
        Ratios(str(entry["run"]), bool(entry["experts"]), entry["ratios"], str(entry["model"])) for entry in content
    )


def runs_of_kind(*, experts: bool, ratios: Iterable[Ratios]) -> list[Ratios]:
    """Return published runs of models with or without experts."""
    return [entry for entry in ratios if entry.experts == experts]


def ratios_of(phase: str, *, experts: bool, ratios: Iterable[Ratios]) -> list[float]:
    """Return the ratios of a phase in runs of this kind of model."""
    runs = runs_of_kind(experts=experts, ratios=ratios)
    return [run.of.get(phase, run.of.get(STEP, 0.0)) for run in runs if phase in run.of or set(run.of) == {STEP}]


def spreads(estimate: Estimate, *, experts: bool, ratios: Iterable[Ratios]) -> list[Spread]:
    """Return the spread of each phase with published runs, and of the step, with all other phases as estimated."""
    runs, result = tuple(ratios), []
    for phase in estimate.phases:
        seen = ratios_of(phase.name, experts=experts, ratios=runs)
        if seen:
            typical = math.exp(sum(map(math.log, seen)) / len(seen))
            low, typical, high = (phase.seconds * ratio for ratio in (min(seen), typical, max(seen)))
            result.append(Spread(phase.name, low, typical, high, len(seen)))
    if not result:
        return []
    by_name = {spread.name: spread for spread in result}

    def step(bound: str) -> float:
        return _end(estimate.phases, {name: getattr(spread, bound) for name, spread in by_name.items()})

    return [*result, Spread(STEP, step("low"), step("typical"), step("high"), min(spread.runs for spread in result))]


def _end(phases: list[PhaseTime], seconds: Mapping[str, float]) -> float:
    """Return the end of a step with the given `seconds` of phases, else estimated ones.

    A phase that begins at 0 overlaps with the phases before it; a phase that began at the end of overlapping phases waits
    for all of them.
    """
    now = last = 0.0
    for phase in phases:
        begin = now if phase.begin is None else 0.0 if phase.begin == 0.0 else last
        now = begin + seconds.get(phase.name, phase.seconds)
        last = max(last, now)
    return last
