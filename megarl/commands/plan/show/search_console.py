"""Result of a search, for the console and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from megarl.commands.plan.count.types import Estimate
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import Choice, TrainerLayout, apply_choice, overrides
from megarl.commands.plan.search.search import FittingLayout, SearchResult
from megarl.commands.plan.show.tables import table, transposed
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.commands.plan.time.estimate import estimate
from megarl.errors import pluralize
from megarl.megatron.layout import check_layout
from megarl.recipe.derived.offload import offloads

_WHY = 2  # phases that are listed


def show(subject: Subject, result: SearchResult) -> None:
    """Print the best layouts, the overrides of the first, and the counts of the others."""
    console = Console(width=100)
    current = _own_estimate(subject)
    if result.best:
        console.print(_table(subject, result, current))
        best = result.best[0].choice
        engines = best.engines
        group = f" in groups of {engines.data_parallel}" if engines.data_parallel > 1 else ""
        console.print(
            f"All with {pluralize(engines.engines, 'engine')} of TP{engines.tensor_parallel}{group}.", highlight=False
        )
        if current is not None:
            console.print(f"The recipe's own layout: {current.seconds:.1f} s, estimated.", highlight=False)
        console.print("Overrides of the first:")
        console.print(f"  {' '.join(overrides_of(subject, best)) or 'none: it is the recipe'}\n", soft_wrap=True)
    else:
        hosts = f" and hosts of {subject.device.host_memory:,.10g} GiB" if result.hosts_too_small else ""
        console.print(f"No layout that fits into {sized(subject.limit)}{hosts} was found.")
    unchecked = [f"Not checked: {line}" for line in result.unchecked]
    for line in (*summary_lines(result), *unchecked, *result.notes):
        console.print(f"- {line}", style="dim", highlight=False)


def as_json(subject: Subject, result: SearchResult) -> str:
    lists = {"unchecked": result.unchecked, "notes": result.notes}
    counts = {name: value for name, value in asdict(result).items() if name not in ("best", *lists)}
    best = [
        {
            "overrides": overrides_of(subject, fitting.choice),
            "choice": asdict(fitting.choice),
            "peak_gib": fitting.peak / GIB,
            "estimate": asdict(_estimate(subject, fitting.choice)),
        }
        for fitting in result.best
    ]
    return json.dumps({"memory_gib": subject.limit / GIB, "best": best, "choices": counts, **lists})


def summary_lines(result: SearchResult) -> list[str]:
    """Return the counts of a search as sentences."""
    lines = [
        f"Possible: {pluralize(result.possible, 'choice')} of layout, micro batch, recomputation and offloading that model and "
        "machines allow.",
        f"Left out by arithmetic, since their lower bound exceeds the device: {result.too_large:,}.",
        f"Counted: {len(result.best) + result.counted_too_large + result.hosts_too_small}, of which fit: {len(result.best)}. Forecast to "
        f"be too large, and not counted: {result.unlikely:,}.",
        *(
            [f"Fit the devices, but not their hosts: {result.hosts_too_small}; the first: {result.host_refusal}"]
            if result.hosts_too_small
            else []
        ),
        "Slower than a layout in the table that differs only in layers of stages, micro batch, recomputation or offloading: "
        f"{result.slower:,}.",
        *(_left(result) or [f"All were examined, in {result.seconds:.0f} s."]),
        *([f"Engines are not counted in the memory. {result.not_counted}."] if result.not_counted else []),
        "Seconds are estimated (docs/planner.md). Teacher, judge and critic stay as in the recipe.",
    ]
    return lines + [
        f"Refused by a run, {pluralize(times, 'choice')}: {' '.join(error.split())}"
        for error, times in result.refused.most_common(3)
    ]


def _left(result: SearchResult) -> list[str]:
    """Return sentences on the choices that the search did not examine."""
    lines = []
    if result.not_examined:
        lines.append(f"Not examined, since {len(result.best)} layouts were found: {result.not_examined:,}.")
    if result.not_reached:
        lines.append(f"Not reached in {result.seconds:.0f} s (--seconds): {result.not_reached:,}.")
    return lines


def name_of(layout: TrainerLayout) -> str:
    """Format a layout, e.g. "TP4 PP2x3 EP8": two stages of three chunks; sizes of 1 are left out."""
    pipeline = f"PP{layout.pipeline_parallel}" if layout.pipeline_parallel > 1 else ""
    if layout.virtual_pipeline:
        pipeline += f"x{layout.virtual_pipeline}"
    if layout.first_stage_layers or layout.last_stage_layers:
        pipeline += f"({layout.first_stage_layers or ''}..{layout.last_stage_layers or ''})"
    parallel_sizes = (
        ("TP", layout.tensor_parallel),
        ("CP", layout.context_parallel),
        ("EP", layout.expert_parallel),
        ("ETP", layout.expert_tensor_parallel),
    )
    sizes = [f"{name}{size}" for name, size in parallel_sizes if size > 1]
    return (
        " ".join([*sizes[:1], pipeline, *sizes[1:]] if layout.tensor_parallel > 1 else [pipeline, *sizes]).strip()
        or "DP"
    )


def _table(subject: Subject, result: SearchResult, current: Estimate | None) -> Table:
    title = f"Layouts that fit into {sized(subject.limit)}, by estimated seconds of a step"
    unit = Unit.of(max((fitting.peak for fitting in result.best), default=0))
    head = ["layout", "micro batch", "recompute", unit.name, "s", "bubble", "why"]
    rows = [_row(subject, fitting, current, unit) for fitting in result.best]
    layouts = table(transposed([head, *rows]), title, left=("recompute", "why"))
    layouts.columns[-1].no_wrap = False
    return layouts


def _row(subject: Subject, fitting: FittingLayout, current: Estimate | None, unit: Unit) -> list[str]:
    new = _estimate(subject, fitting.choice)
    trainers_offload = ", stays" if offloads(subject.recipe) and not fitting.choice.offload else ""
    return [
        name_of(fitting.choice.layout),
        str(fitting.choice.tokens),
        fitting.choice.recompute + trainers_offload,
        unit.tenths(fitting.peak),
        f"{new.seconds:.1f}",
        f"{new.bubble:.0%}",
        why(new, current),
    ]


def why(new: Estimate, current: Estimate | None) -> str:
    """Name the phases in which `new` and the recipe's estimate differ most."""
    if current is None:
        return "the recipe's layout cannot run"
    before = {phase.name: phase.seconds for phase in current.phases}
    after = {phase.name: phase.seconds for phase in new.phases}
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:_WHY]
    return (
        ", ".join(f"{name} {changes[name]:+.0f} s" for name in largest if abs(changes[name]) >= 0.5) or "as the recipe"
    )


def _estimate(subject: Subject, choice: Choice) -> Estimate:
    recipe = apply_choice(subject.recipe, choice)
    return estimate(recipe, subject.models, subject.device, response=subject.response)


def _own_estimate(subject: Subject) -> Estimate | None:
    try:
        check_layout(subject.model, subject.recipe.megatron, subject.recipe.cluster.trainers)
    except ValueError:
        return None
    return estimate(subject.recipe, subject.models, subject.device, response=subject.response)


def overrides_of(subject: Subject, choice: Choice) -> list[str]:
    return overrides(subject.recipe, apply_choice(subject.recipe, choice))
