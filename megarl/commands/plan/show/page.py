"""A plan as one HTML page that needs no network: memory, the pipeline's schedule, the phases of a step."""

from __future__ import annotations

from typing import Any

from megarl.commands.plan.count.types import DeviceUses, EngineRank, PipelineStage, RecipePlan
from megarl.commands.plan.show import drawing
from megarl.commands.plan.show.console import host_columns
from megarl.commands.plan.show.estimate_table import STEP, remarks, seconds_columns
from megarl.commands.plan.show.estimate_table import seconds as in_seconds
from megarl.commands.plan.show.tables import head_and_rows, transposed
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.errors import pluralize
from megarl.observe.console import clock, short
from megarl.observe.html import page


def render(plan: RecipePlan) -> str:
    """Return the page's HTML."""
    unit = Unit.of(plan.most)
    text, kind = verdict(plan)
    return page(
        "plan.html.j2",
        plan=plan,
        verdict={"text": text, "kind": kind},
        facts=_facts(plan),
        figures=_figures(plan, unit),
        unit=unit,
        colours=drawing.COLOURS,
        places=list(zip((place for place in plan.places if place.uses), drawing.memory(plan, unit), strict=True)),
        phase_names=_phase_names(plan.places),
        totals=_totals(plan, unit),
        parts=drawing.parts_of(plan.places),
        pipelines=[drawing.schedule(plan, role) for role in drawing.pipelines(plan)],
        hosts=_hosts(plan),
        weights=_weights(plan),
        time=drawing.time(plan.estimate) if plan.estimate else None,
        seconds=head_and_rows(seconds_columns(plan)) if plan.estimate else None,
        remarks=remarks(plan) if plan.estimate else [],
        spent=drawing.spent_on(plan.estimate) if plan.estimate else [],
        stages=[_stage(stage, unit) for stage in plan.stages],
        engines=[_engine(section, rank, unit) for section, rank in _engines(plan)],
    )


def verdict(plan: RecipePlan) -> tuple[str, str]:
    """Return the verdict and its kind: good, bad or warn."""
    if plan.refusals:
        return "cannot work", "bad"
    if plan.memory is None:
        return "no device given: whether it fits is not known", "warn"
    if any(stage.not_counted for stage in plan.stages):
        return "not known: activations are not counted", "warn"
    if plan.not_counted:
        return f"not known: memory of engines ({', '.join(plan.not_counted)})", "warn"
    if any(place.uses and place.peak.total > plan.memory * GIB for place in plan.places):
        return "does not fit", "bad"
    return "fits", "good"


def _facts(plan: RecipePlan) -> list[tuple[str, str]]:
    device_facts = [
        plan.device.name if plan.device else None,
        f"{plan.memory:g} GiB" if plan.memory is not None else None,
    ]
    facts = [("Device", ", ".join(word for word in device_facts if word) or "none given")]
    for role in dict.fromkeys(stage.role for stage in plan.stages):
        of_role = [stage for stage in plan.stages if stage.role == role]
        stages = pluralize(len(of_role), "pipeline stage")
        chunks = f" of {of_role[0].chunks} chunks" if of_role[0].chunks > 1 else ""
        facts.append((role.capitalize(), stages + chunks))
    return facts


def _figures(plan: RecipePlan, unit: Unit) -> list[dict[str, str]]:
    """Return the key figures at the top of the page."""
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
        length = f"responses of {estimate.response:,.0f} tokens in the mean"
        if (expected := next((spread for spread in plan.spread if spread.name == STEP), None)) is not None:
            limits = f"published runs: {clock(expected.low)} to {clock(expected.high)}"
            spread = limits if expected.runs > 1 else "one published run, so no range"
            figure("Step, expected", clock(expected.typical), f"raw {clock(estimate.seconds)}; {spread}; {length}")
            speed = short(estimate.tokens / expected.typical)
            figure(
                "Tokens/s, expected", speed, f"raw {short(estimate.tokens_per_second)}; {short(estimate.tokens)} a step"
            )
        else:
            figure("Step, estimated", clock(estimate.seconds), length)
            speed = short(estimate.tokens_per_second)
            figure("Tokens/s, estimated", speed, f"{short(estimate.tokens)} tokens a step")
        figure(
            "Micro batches",
            f"{estimate.micro_batches:,}",
            f"of a mini batch and rank; {estimate.tokens_per_micro_batch:,.0f} tokens each",
        )
        if drawing.pipelines(plan):
            figure("Pipeline's bubble", f"{estimate.bubble:.1%}", "of the update, in which a stage waits")
    if plan.engine and plan.engine.sequences is not None:
        figure("Room in an engine", f"{plan.engine.sequences:,.0f}", "sequences of the longest length")
    if plan.weight_sync:
        total = Unit.for_size(plan.weight_sync.total)
        figure(
            f"Weight sync, {plan.weight_sync.route}",
            sized(plan.weight_sync.total),
            f"{total.show(plan.weight_sync.between_nodes)} of it between nodes; a trainer sends up to "
            f"{sized(plan.weight_sync.sent)}, an engine's device receives up to {sized(plan.weight_sync.received)}",
        )
    return figures


# ---- memory


def _phase_names(places: list[DeviceUses]) -> list[str]:
    return list(dict.fromkeys(use.phase for place in places for use in place.uses))


def _totals(plan: RecipePlan, unit: Unit) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (place, cells (text, CSS class) for each of `_phase_names`)."""
    limit = plan.memory * GIB if plan.memory is not None else None

    def cell(place: DeviceUses, phase: str) -> tuple[str, str]:
        total = next((use.total for use in place.uses if use.phase == phase), None)
        if total is None:
            return "–", ""
        too_much = limit is not None and total > limit
        return unit.show(total), "fault" if too_much else "most" if total == place.peak.total else ""

    names = _phase_names(plan.places)
    return [(place.name, [cell(place, name) for name in names]) for place in plan.places if place.uses]


def _hosts(plan: RecipePlan) -> dict[str, Any] | None:
    """Return the table of hosts: its head, and rows (machines, cells (text, CSS class))."""
    if not plan.hosts or plan.device is None:
        return None
    head, *rows = transposed(host_columns(plan.hosts, plan.device.host_memory))
    marked = []
    for host, (name, *cells) in zip(plan.hosts, rows, strict=True):
        too_much = host.total > plan.device.host_memory * GIB
        marked.append((name, [*((cell, "") for cell in cells[:-1]), (cells[-1], "fault" if too_much else "")]))
    return {"head": head, "rows": marked}


# ---- seconds and weight sync


def _weights(plan: RecipePlan) -> dict[str, Any] | None:
    """Return the expected route, the seconds of each route, and the routes with other versions."""
    if not plan.routes:
        return None
    expected, *other_routes = plan.routes
    each = plan.estimate.weights if plan.estimate else {}
    return {
        "expected": expected,
        "seconds": [(name, in_seconds(value)) for name, value in sorted(each.items())],
        "others": [other for other in other_routes if other.name != expected.name],
        "network": f"{plan.device.host_network / 1e9:.3g} GB/s" if plan.device else "",
    }


# ---- stages and engines


def _engines(plan: RecipePlan) -> list[tuple[str, EngineRank]]:
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


def _stage(stage: PipelineStage, unit: Unit) -> dict[str, Any]:
    """Return a row of the table: memory of the stage, of its passes, and of its host."""
    held, beyond = stage.held, stage.activations
    return {
        "name": stage.name,
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
        "host": unit.show(stage.host),
    }
