"""A plan on the console."""

from __future__ import annotations

from rich.console import Console, Group

from megarl.commands.plan.count.types import DeviceUses, EngineRank, HostUse, PipelineStage, RecipePlan
from megarl.commands.plan.show.estimate_table import TITLE, remarks, seconds, seconds_columns
from megarl.commands.plan.show.tables import Columns, console_width, fitted, transposed, upright, width_of
from megarl.commands.plan.show.units import GIB, Unit

# Phases -> column heads.
_SHORT = {
    "old_log_prob": "old",
    "reference": "ref",
    "update_critic": "critic",
    "update_critic, Adam": "Adam",
    "update_actor": "actor",
    "update_actor, Adam": "Adam",
    "weight_sync": "weight sync",
}


def show(plan: RecipePlan) -> None:
    width, unit = console_width(), Unit.of(plan.most)
    console = Console(width=width)
    console.print(_stages(plan.stages, unit, width))
    console.print(
        _places(plan.places, plan.memory, unit, width, counted=all(stage.activations for stage in plan.stages))
    )
    readers = [(section, rank) for section, rank in plan.readers.items()]
    for section, rank in ([("engine", plan.engine)] if plan.engine else []) + readers:
        console.print(_engine(section, rank, unit), highlight=False)
    if plan.hosts and plan.device is not None:
        console.print(host_table(plan.hosts, plan.device.host_memory, width))
    if plan.weight_sync:
        links = plan.weight_sync
        console.print(
            f"weight sync, {links.route}: {unit.show(links.total)} {unit.name} in all, {unit.show(links.between_nodes)} between "
            f"nodes; a trainer sends up to {unit.show(links.sent)}, an engine's device receives up to {unit.show(links.received)}",
            highlight=False,
        )
    for line in route_lines(plan):
        console.print(line, highlight=False)
    for variable in plan.environment:
        console.print(
            f"environment of {variable.role}: {variable.name}={variable.value} ({variable.why})", highlight=False
        )
    show_seconds(plan, console)
    for refusal in plan.refusals:
        console.print(f"REFUSED {refusal.key}: {refusal.problem}. {refusal.remedy}", style="red", highlight=False)
    for suggestion in plan.suggestions:
        line = f"  fits, with {suggestion.times:.2f} x the seconds of a step: {suggestion.overrides}"
        console.print(line, highlight=False, soft_wrap=True)  # users copy this line
    for line in plan.unchecked:
        console.print(f"- Not checked: {line}", style="dim", highlight=False)
    for line in plan.notes:
        console.print(f"- {line}", style="dim", highlight=False)


def _stages(stages: list[PipelineStage], unit: Unit, width: int) -> Group:
    """Return the table of memory that a rank holds and that each pass adds."""
    parameters = Unit.of_parameters(max((stage.held.parameters for stage in stages), default=0))
    rows = [["stage", "params", "weights", "grads", "optim", "forward", "update", "logits", "Adam", "host"]]
    for stage in stages:
        held, beyond = stage.held, stage.activations
        passes = ["?"] * 4
        if beyond is not None:
            sizes = (beyond.forward, beyond.update, beyond.update_logits, beyond.optimizer)
            passes = [f"+{unit.tenths(size)}" for size in sizes]
            passes[2] = unit.tenths(beyond.update_logits)  # part of the update, not added to it
        rows.append(
            [
                stage.name,
                f"{held.parameters / parameters.size:.2f} {parameters.name}",
                *(unit.tenths(size) for size in (held.weights, held.gradients, held.masters + held.moments)),
                *passes,
                unit.tenths(stage.host),
            ]
        )
    return fitted(transposed(rows), f"{unit.name} of a rank, by pipeline stage", width)


def _places(places: list[DeviceUses], memory: float | None, unit: Unit, width: int, *, counted: bool) -> Group:
    """Return the table of memory by kind of device and phase: one phase per column, or per row if there are too many for the
    console. `counted`: activations were counted."""
    phases = list(dict.fromkeys(use.phase for place in places for use in place.uses))
    # A tiny model uses next to nothing of a device, so the device's memory has its own unit.
    whole = Unit.of(memory * GIB) if memory is not None else unit
    room = [] if memory is None else [f"of {whole.whole(memory * GIB)}" + (f" {whole.name}" if whole != unit else "")]
    rows = []
    for place in places:
        totals = {use.phase: use.total for use in place.uses}
        rows.append([place.name, str(place.devices)])
        rows[-1] += [unit.tenths(totals[phase]) if phase in totals else "" for phase in phases]
        if memory is not None:
            left = memory * GIB - place.peak.total
            enough = f"{whole.tenths(left)} left" if counted and place.not_counted is None else "not known"
            rows[-1].append(enough if left >= 0 else f"{whole.tenths(-left)} short")
    title = f"{unit.name} of a device, by phase of a step"
    columns = transposed([["on it", "devices", *(_SHORT.get(phase, phase) for phase in phases), *room], *rows])
    if width_of(columns) > width:
        columns = [["on it", "devices", *phases, *room], *rows]
    return fitted(columns, title, width)


def host_table(hosts: list[HostUse], memory: float, width: int) -> Group:
    """Return a table with one row per group of equal machines, or one column if there are too many parts."""
    return upright(host_columns(hosts, memory), "GiB of host memory, by machine", width)


def host_columns(hosts: list[HostUse], memory: float) -> Columns:
    """Return columns: the machines, each part, the sum, and the rest of `memory` GiB."""
    names = list(dict.fromkeys(part for host in hosts for part in host.parts))
    first = ["host of", *(host.name for host in hosts)]
    columns = [first, *([name, *(f"{host.parts.get(name, 0) / GIB:,.1f}" for host in hosts)] for name in names)]
    columns.append(["all", *(f"{host.total / GIB:,.1f}" for host in hosts)])
    left = [memory - host.total / GIB for host in hosts]
    columns.append(
        [f"of {memory:,.10g}", *(f"{rest:,.1f} left" if rest >= 0 else f"{-rest:,.1f} short" for rest in left)]
    )
    return columns


def _engine(section: str, rank: EngineRank, unit: Unit) -> str:
    where = f"on each of {rank.devices} devices" if rank.devices > 1 else "on its device"
    parameters = Unit.of_parameters(rank.parameters)
    parts = [
        f"{section}, {where}: {rank.parameters / parameters.size:.2f} {parameters.name} parameters, weights "
        f"{unit.show(rank.weights)} {unit.name}, largest step {unit.show(rank.working)}"
    ]
    if rank.cache is not None and rank.sequences is not None:
        tokens = rank.cache / rank.cache_per_token
        parts.append(
            f"KV cache {unit.show(rank.cache)}: {tokens:,.0f} tokens, {rank.sequences:,.1f} sequences of the longest length"
        )
    return "; ".join(parts)


def show_seconds(plan: RecipePlan, console: Console) -> None:
    """Print the estimate, its factors, its range over published runs, and the assumptions."""
    if plan.estimate is None:
        return
    console.print(fitted(seconds_columns(plan), TITLE, console.width, left=("bound by",)), highlight=False)
    for line in remarks(plan):
        console.print(f"- {line}", highlight=False)
    console.print()


def route_lines(plan: RecipePlan) -> list[str]:
    """Return lines on the weights' expected route, its seconds, and other version sets with another route."""
    if not plan.routes:
        return []
    expected, *other_routes = plan.routes
    lines = [f"weight route: {expected}; no route was measured on a device yet"]
    if plan.estimate is not None and plan.estimate.weights:
        times = ", ".join(f"{name} {seconds(value)}" for name, value in sorted(plan.estimate.weights.items()))
        where = f"{plan.device.host_network / 1e9:.3g} GB/s" if plan.device else "the host's network"
        lines.append(
            f"  an update of the engines: {times} (the full route uses gloo over each host's interface, {where})"
        )
    lines += [f"  elsewhere: {other}" for other in other_routes if other.name != expected.name]
    return lines
