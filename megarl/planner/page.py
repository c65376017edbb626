"""A plan as one HTML page that needs no network: what fits where, the pipeline's schedule, the phases of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megarl.observe.console import clock, short
from megarl.observe.files import disk_errors, write_whole
from megarl.observe.report import page
from megarl.planner import pipeline
from megarl.planner.cost import WORDS
from megarl.planner.estimate import spans
from megarl.planner.plan import EngineRank, Estimate, PhaseTime, Place, Plan, Use
from megarl.planner.stages import Stage

TIB, GIB, MIB = 2**40, 2**30, 2**20


def write_page(plan: Plan, path: Path) -> None:
    """Write the page; `path` is the old file or the new one, never a part of it."""
    with disk_errors(path):
        write_whole(path, render(plan).encode("utf-8", "backslashreplace"))


def render(plan: Plan) -> str:
    """The page, as text."""
    unit = Unit.of(plan)
    text, kind = verdict(plan)
    drawn = [_pipeline(plan, role) for role in _pipelines(plan)]
    return page(
        "plan.html.j2",
        {
            "resumes": [],
            "memory": _memory(plan, unit),
            "pipelines": drawn,
            "time": _time(plan.estimate) if plan.estimate else None,
        },
        plan=plan,
        verdict={"text": text, "kind": kind},
        facts=_facts(plan),
        figures=_figures(plan, unit),
        unit=unit,
        places=[place for place in plan.places if place.uses],
        phase_names=_phase_names(plan.places),
        totals=_totals(plan, unit),
        parts=_parts(plan.places),
        pipelines=drawn,
        stages=[_stage(stage, unit) for stage in plan.stages],
        engines=[_engine(section, rank, unit) for section, rank in _engines(plan)],
    )


def verdict(plan: Plan) -> tuple[str, str]:
    """(in words, good, bad or warn)."""
    if plan.refusals:
        return "cannot work", "bad"
    if plan.memory is None:
        return "no device given: what fits is not known", "warn"
    if any(stage.not_counted for stage in plan.stages):
        return "not known: activations are not counted", "warn"
    if plan.not_counted:
        return f"not known: what engines hold ({', '.join(plan.not_counted)})", "warn"
    if any(place.uses and place.peak.total > plan.memory * GIB for place in plan.places):
        return "does not fit", "bad"
    return "fits", "good"


class Unit(NamedTuple):
    """In which bytes are shown: what a tiny model needs is nothing in GiB."""

    name: str
    size: int

    @classmethod
    def of(cls, plan: Plan) -> Unit:
        most = max((place.peak.total for place in plan.places if place.uses), default=0)
        most = most or max((stage.held.weights for stage in plan.stages), default=0)
        return cls("GiB", GIB) if most >= GIB else cls("MiB", MIB)

    @classmethod
    def for_size(cls, size: int) -> Unit:
        return next((cls(name, unit) for name, unit in (("TiB", TIB), ("GiB", GIB)) if size >= unit), cls("MiB", MIB))

    def show(self, size: float | None) -> str:
        """Digits that one reads: 0.04, 1.2, 53.1, 1,234."""
        if size is None:
            return "–"
        value = size / self.size
        return f"{value:,.0f}" if value >= 1000 or value == 0 else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    known = [plan.device.name if plan.device else None, f"{plan.memory:g} GiB" if plan.memory is not None else None]
    facts = [("Device", ", ".join(word for word in known if word) or "none given")]
    for role in dict.fromkeys(stage.role for stage in plan.stages):
        own = [stage for stage in plan.stages if stage.role == role]
        stages = f"{len(own)} pipeline stage{'s' * (len(own) > 1)}"
        chunks = f" of {own[0].chunks} chunks" if own[0].chunks > 1 else ""
        facts.append((role.capitalize(), stages + chunks))
    return facts


def _figures(plan: Plan, unit: Unit) -> list[dict[str, str]]:
    """The few numbers one asks for first."""
    figures = []

    def figure(label: str, value: str, detail: str) -> None:
        figures.append({"label": label, "value": value, "detail": detail})

    places = [place for place in plan.places if place.uses]
    if places:
        fullest = max(places, key=lambda place: place.peak.total)
        detail = f"{fullest.name}, {fullest.peak.phase}"
        if plan.memory:
            detail += f"; {fullest.peak.total / (plan.memory * GIB):.0%} of the device"
        figure("Fullest device", f"{unit.show(fullest.peak.total)} {unit.name}", detail)
    if estimate := plan.estimate:
        figure("Step, estimated", clock(estimate.seconds), f"responses of {estimate.response:,.0f} tokens in the mean")
        figure("Tokens/s, estimated", short(estimate.tokens_per_second), f"{short(estimate.tokens)} tokens a step")
        figure(
            "Micro batches",
            f"{estimate.micro_batches:,}",
            f"of a mini batch and rank; {estimate.tokens_per_micro_batch:,.0f} tokens each",
        )
        if _pipelines(plan):
            figure("Pipeline's bubble", f"{estimate.bubble:.1%}", "of the update, in which a stage waits")
    if plan.engine and plan.engine.sequences is not None:
        figure("Room in an engine", f"{plan.engine.sequences:,.0f}", "sequences of the longest length")
    if plan.exchange:
        total = Unit.for_size(plan.exchange.total)
        sent, received = (Unit.for_size(size) for size in (plan.exchange.sent, plan.exchange.received))
        figure(
            f"Weight exchange, {plan.exchange.route}",
            f"{total.show(plan.exchange.total)} {total.name}",
            f"{total.show(plan.exchange.between_nodes)} of it between nodes; a trainer sends up to "
            f"{sent.show(plan.exchange.sent)} {sent.name}, an engine's device receives up to "
            f"{received.show(plan.exchange.received)} {received.name}",
        )
    return figures


# ---- memory


def _phase_names(places: list[Place]) -> list[str]:
    return list(dict.fromkeys(use.phase for place in places for use in place.uses))


def _parts(places: list[Place]) -> list[str]:
    return list(
        dict.fromkeys(part for place in places for use in place.uses for part, size in use.parts.items() if size)
    )


def _memory(plan: Plan, unit: Unit) -> dict[str, Any]:
    """What the script draws: of each place a bar for each phase, cut into parts."""

    def amounts(use: Use) -> list[float]:
        return [use.parts.get(part, 0) / unit.size for part in parts]

    parts = _parts(plan.places)
    return {
        "unit": unit.name,
        "limit": plan.memory * GIB / unit.size if plan.memory is not None else None,
        "parts": parts,
        "places": [
            {"phases": [use.phase for use in place.uses], "parts": [amounts(use) for use in place.uses]}
            for place in plan.places
            if place.uses
        ],
    }


def _totals(plan: Plan, unit: Unit) -> list[tuple[str, list[tuple[str, str]]]]:
    """(place, (what it needs, how it is marked) in each of `_phase_names`)."""
    limit = plan.memory * GIB if plan.memory is not None else None

    def cell(place: Place, phase: str) -> tuple[str, str]:
        total = next((use.total for use in place.uses if use.phase == phase), None)
        if total is None:
            return "–", ""
        too_much = limit is not None and total > limit
        return unit.show(total), "fault" if too_much else "most" if total == place.peak.total else ""

    names = _phase_names(plan.places)
    return [(place.name, [cell(place, name) for name in names]) for place in plan.places if place.uses]


# ---- the pipeline


def _pipelines(plan: Plan) -> list[str]:
    roles = [stage.role for stage in plan.stages]
    return [role for role in dict.fromkeys(roles) if roles.count(role) > 1]


def _pipeline(plan: Plan, role: str) -> dict[str, Any]:
    own = [stage for stage in plan.stages if stage.role == role]
    stages, chunks = len(own), own[0].chunks
    known = plan.estimate is not None and role == "actor"
    micro_batches = plan.estimate.micro_batches if plan.estimate and known else 2 * stages
    slots = pipeline.schedule(stages, chunks, micro_batches)
    window = pipeline.folded(slots, _shown(stages))
    return {
        "role": role,
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "known": known,
        "bubble": pipeline.bubble(stages, chunks, micro_batches),
        "slots": [[s.stage, s.chunk, s.micro_batch, int(s.backward), *_rounded(s.begin, s.end)] for s in window.slots],
        "length": window.length,
        "fold": window.fold,
        "hidden": window.hidden,
    }


def _shown(stages: int) -> float:
    """So much of a schedule that at either end the pipeline is seen to be full, and some of what it does then."""
    return 2 * ((1 + pipeline.BACKWARD) * stages + 3)


def _rounded(*values: float) -> list[float]:
    return [round(value, 4) for value in values]


# ---- the phases of a step


def _time(estimate: Estimate) -> dict[str, Any]:
    """Of each phase its name, when it begins, its seconds by what they are spent on."""
    parts = list(dict.fromkeys(part for phase in estimate.phases for part in _spent(phase)))
    return {
        "parts": parts,
        "phases": [
            [phase.name, begin, phase.seconds, [_spent(phase).get(part, 0.0) for part in parts]]
            for phase, (begin, _) in zip(estimate.phases, spans(estimate.phases), strict=True)
        ],
        "step": estimate.seconds,
    }


def _spent(phase: PhaseTime) -> dict[str, float]:
    if not phase.parts:
        return {phase.bound: phase.seconds}
    return {WORDS[part]: seconds for part, seconds in phase.parts.items()}


# ---- the stages and the engines


def _engines(plan: Plan) -> list[tuple[str, EngineRank]]:
    return [*([("rollout", plan.engine)] if plan.engine else []), *plan.readers.items()]


def _engine(section: str, rank: EngineRank, unit: Unit) -> dict[str, Any]:
    return {
        "name": section,
        "cells": [
            f"{rank.devices:,}",
            f"{rank.parameters:,}",
            unit.show(rank.weights),
            unit.show(rank.working),
            f"{rank.cache_per_token:,.0f}",
            unit.show(rank.cache),
            "–" if rank.sequences is None else f"{rank.sequences:,.1f}",
        ],
    }


def _stage(stage: Stage, unit: Unit) -> dict[str, Any]:
    """A row of the table: what the stage holds, what passes take beyond, what its host holds."""
    held, beyond = stage.held, stage.activations
    host = max((phase.host for phase in stage.phases.values()), default=0)
    return {
        "name": f"{stage.role} {stage.number}",
        "rank": stage.rank,
        "parameters": f"{held.parameters:,}",
        "trained": f"{held.trained:,}",
        "held": [unit.show(size) for size in (held.weights, held.gradients, held.masters + held.moments)],
        "beyond": [
            unit.show(size)
            for size in (
                (beyond.forward, beyond.update, beyond.kept, beyond.update_logits, beyond.optimizer)
                if beyond
                else (None,) * 5
            )
        ],
        "host": unit.show(host),
    }
