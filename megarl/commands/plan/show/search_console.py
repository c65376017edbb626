"""What a search found, for the console and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.commands.plan.count.types import Estimate
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import Choice, Layout, chosen, overrides
from megarl.commands.plan.search.search import Fitting, Found
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.commands.plan.time.estimate import estimate
from megarl.megatron.layout import check_layout
from megarl.recipe.offload import offloads
from megarl.text import pluralize

_WHY = 2  # phases that are named


def show(subject: Subject, found: Found) -> None:
    """Print the best, what to write for the first of them, and what became of the others."""
    console = Console(width=100)
    own = _own_estimate(subject)
    if found.best:
        console.print(_table(subject, found, own))
        best = found.best[0].choice
        engines = best.engines
        group = f" in groups of {engines.data_parallel}" if engines.data_parallel > 1 else ""
        console.print(
            f"All with {pluralize(engines.engines, 'engine')} of TP{engines.tensor_parallel}{group}.", highlight=False
        )
        if own is not None:
            console.print(f"The recipe's own layout: {own.seconds:.1f} s, estimated.", highlight=False)
        console.print("On the command line, the first of them:")
        console.print(f"  {' '.join(_overrides(subject, best)) or 'nothing: it is the recipe'}\n", soft_wrap=True)
    else:
        hosts = f" and hosts of {subject.device.host_memory:,.10g} GiB" if found.hosts_too_small else ""
        console.print(f"No layout was found that fits into {sized(subject.limit)}{hosts}.")
    for line in said(found):
        console.print(f"- {line}", style="dim", highlight=False)


def as_json(subject: Subject, found: Found) -> str:
    counts = {name: value for name, value in asdict(found).items() if name != "best"}
    best = [
        {
            "overrides": _overrides(subject, one.choice),
            "choice": asdict(one.choice),
            "peak_gib": one.peak / GIB,
            "estimate": asdict(_estimate(subject, one.choice)),
        }
        for one in found.best
    ]
    return json.dumps({"memory_gib": subject.limit / GIB, "best": best, "choices": counts})


def said(found: Found) -> list[str]:
    """What became of all that was possible."""
    lines = [
        f"Possible: {pluralize(found.possible, 'choice')} of layout, micro batch, recomputation and offloading, as far as model "
        "and machines allow.",
        f"Left out by arithmetic, needing more at least than the device has: {found.too_large:,}.",
        f"Counted: {len(found.best) + found.counted_too_large + found.hosts_too_small}, of which fit: {len(found.best)}. Forecast to "
        f"be too large, and not counted: {found.unlikely:,}.",
        *(
            [f"Fit the devices, and not their hosts: {found.hosts_too_small}; the first: {found.host_refusal}"]
            if found.hosts_too_small
            else []
        ),
        "Slower than one in the table that differs in layers of stages, micro batch, recomputation or offloading alone: "
        f"{found.slower:,}.",
        f"Not reached in {found.seconds:.0f} s (--seconds): {found.not_reached:,}."
        if found.not_reached
        else f"All were looked at, in {found.seconds:.0f} s.",
        *([f"Engines are left out of what fits. {found.not_counted}."] if found.not_counted else []),
        "Seconds are estimated (docs/planner.md). Teacher, judge and critic are left as the recipe has them.",
    ]
    return lines + [
        f"Refused by a run, {pluralize(times, 'choice')}: {' '.join(why.split())}"
        for why, times in found.refused.most_common(3)
    ]


def name_of(layout: Layout) -> str:
    """As in "TP4 PP2x3 EP8": two stages of three chunks; sizes of 1 are left out."""
    pipeline = f"PP{layout.pipeline_parallel}" if layout.pipeline_parallel > 1 else ""
    if layout.virtual_pipeline:
        pipeline += f"x{layout.virtual_pipeline}"
    if layout.first_stage_layers or layout.last_stage_layers:
        pipeline += f"({layout.first_stage_layers or ''}..{layout.last_stage_layers or ''})"
    others = (
        ("TP", layout.tensor_parallel),
        ("CP", layout.context_parallel),
        ("EP", layout.expert_parallel),
        ("ETP", layout.expert_tensor_parallel),
    )
    sizes = [f"{name}{size}" for name, size in others if size > 1]
    return (
        " ".join([*sizes[:1], pipeline, *sizes[1:]] if layout.tensor_parallel > 1 else [pipeline, *sizes]).strip()
        or "DP"
    )


def _table(subject: Subject, found: Found, own: Estimate | None) -> Table:
    title = f"Layouts that fit into {sized(subject.limit)}, by estimated seconds of a step"
    unit = Unit.of(max((one.peak for one in found.best), default=0))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layout", "micro batch", "recompute", unit.name, "s", "bubble", "why"):
        side = "left" if name in ("layout", "recompute", "why") else "right"
        table.add_column(name, justify=side, no_wrap=name != "why")  # type: ignore[arg-type]
    for one in found.best:
        table.add_row(*_row(subject, one, own, unit))
    return table


def _row(subject: Subject, one: Fitting, own: Estimate | None, unit: Unit) -> list[str]:
    made = _estimate(subject, one.choice)
    trainers_offload = ", stays" if offloads(subject.recipe) and not one.choice.offload else ""
    return [
        name_of(one.choice.layout),
        str(one.choice.tokens),
        one.choice.recompute + trainers_offload,
        unit.tenths(one.peak),
        f"{made.seconds:.1f}",
        f"{made.bubble:.0%}",
        why(made, own),
    ]


def why(made: Estimate, own: Estimate | None) -> str:
    """The phases in which `made` and the recipe's own differ the most."""
    if own is None:
        return "the recipe's own cannot run"
    before = {phase.name: phase.seconds for phase in own.phases}
    after = {phase.name: phase.seconds for phase in made.phases}
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:_WHY]
    return (
        ", ".join(f"{name} {changes[name]:+.0f} s" for name in largest if abs(changes[name]) >= 0.5) or "as the recipe"
    )


def _estimate(subject: Subject, choice: Choice) -> Estimate:
    recipe = chosen(subject.recipe, choice)
    return estimate(recipe, subject.model, subject.critic_model, subject.device, response=subject.response)


def _own_estimate(subject: Subject) -> Estimate | None:
    try:
        check_layout(subject.model, subject.recipe.megatron, subject.recipe.cluster.trainers)
    except ValueError:
        return None
    return estimate(subject.recipe, subject.model, subject.critic_model, subject.device, response=subject.response)


def _overrides(subject: Subject, choice: Choice) -> list[str]:
    return overrides(subject.recipe, chosen(subject.recipe, choice))
