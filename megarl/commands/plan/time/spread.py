"""How many times as long as estimated published runs took, as a range for estimates that nothing was measured of. Pure.

Ratios are in published_ratios.yaml, which `python -m docs.generate.planner` writes from published.py; a test holds them to it.
A run that was published by its step alone stands for each phase.
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
    """Measured / estimated seconds of one published run, by phase; `step` alone where no phases were published."""

    run: str
    experts: bool  # a mixture of experts
    of: Mapping[str, float] = field(hash=False)
    model: str = ""  # a name of megarl/model_configs


@functools.cache
def published_ratios() -> tuple[Ratios, ...]:
    """Those of the package's file."""
    content = yaml.safe_load(RATIOS.read_text(encoding="utf-8"))
    return tuple(Ratios(str(one["run"]), bool(one["experts"]), one["ratios"], str(one["model"])) for one in content)


def runs_alike(*, experts: bool, ratios: Iterable[Ratios], without: str = "") -> list[Ratios]:
    """Published runs of models with experts, or of those without; `without`: a run that is left out."""
    return [one for one in ratios if one.experts == experts and one.run != without]


def ratios_of(phase: str, *, experts: bool, ratios: Iterable[Ratios], without: str = "") -> list[float]:
    """Ratios of a phase in runs of the same kind of model; `without`: a run that is left out."""
    alike = runs_alike(experts=experts, ratios=ratios, without=without)
    return [one.of.get(phase, one.of.get(STEP, 0.0)) for one in alike if phase in one.of or set(one.of) == {STEP}]


def spreads(estimate: Estimate, *, experts: bool, ratios: Iterable[Ratios], without: str = "") -> list[Spread]:
    """A spread for each phase that some run of the kind published, and for their step with all other phases as estimated."""
    known, found = tuple(ratios), []
    for phase in estimate.phases:
        seen = ratios_of(phase.name, experts=experts, ratios=known, without=without)
        if seen:
            typical = math.exp(sum(map(math.log, seen)) / len(seen))
            low, typical, high = (phase.seconds * ratio for ratio in (min(seen), typical, max(seen)))
            found.append(Spread(phase.name, low, typical, high, len(seen)))
    if not found:
        return []
    by_name = {one.name: one for one in found}

    def step(bound: str) -> float:
        return _end(estimate.phases, {name: getattr(one, bound) for name, one in by_name.items()})

    return [*found, Spread(STEP, step("low"), step("typical"), step("high"), min(one.runs for one in found))]


def _end(phases: list[PhaseTime], seconds: Mapping[str, float]) -> float:
    """When a step ends whose phases take `seconds`, or what is estimated: a phase that begins at 0 runs beside those before it,
    and one that began at the end of phases beside each other waits for them."""
    now = last = 0.0
    for phase in phases:
        begin = now if phase.begin is None else 0.0 if phase.begin == 0.0 else last
        now = begin + seconds.get(phase.name, phase.seconds)
        last = max(last, now)
    return last
