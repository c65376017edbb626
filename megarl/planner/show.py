"""A plan on the console, within 100 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.planner.estimate_table import estimate_lines
from megarl.planner.plan import EngineRank, Place, Plan
from megarl.planner.stages import Stage

_COLUMNS = 100
# Phases -> heads of columns.
_SHORT = {
    "old_log_prob": "old",
    "reference": "ref",
    "update_critic": "critic",
    "update_critic, Adam": "Adam",
    "update_actor": "actor",
    "update_actor, Adam": "Adam",
    "weight_exchange": "exchange",
}


def show(plan: Plan) -> None:
    console = Console(width=_COLUMNS)
    console.print(_stages(plan.stages))
    console.print(_places(plan.places, plan.memory, known=all(stage.activations for stage in plan.stages)))
    readers = [(section, rank) for section, rank in plan.readers.items()]
    for section, rank in ([("engine", plan.engine)] if plan.engine else []) + readers:
        console.print(_engine(section, rank), highlight=False)
    if plan.exchange:
        links = plan.exchange
        console.print(
            f"weight exchange, {links.route}: {gib(links.total):.1f} GiB in all, {gib(links.between_nodes):.1f} between nodes; a trainer "
            f"sends up to {gib(links.sent):.1f}, an engine's device receives up to {gib(links.received):.1f}",
            highlight=False,
        )
    for line in ["", *estimate_lines(plan.estimate), ""] if plan.estimate else [""]:
        console.print(line, highlight=False)
    for refusal in plan.refusals:
        console.print(f"REFUSED {refusal.key}: {refusal.what}. {refusal.remedy}", style="red", highlight=False)
    for proposal in plan.proposals:
        console.print(f"  fits: {proposal}", highlight=False)
    for line in plan.unchecked:
        console.print(f"- Not checked: {line}", style="dim", highlight=False)
    for line in plan.notes:
        console.print(f"- {line}", style="dim", highlight=False)


def _stages(stages: list[Stage]) -> Table:
    """What a rank holds, and what each pass takes beyond."""
    table = _table("GiB of a rank, by pipeline stage")
    for name in ("stage", "params", "weights", "grads", "optim", "forward", "update", "logits", "Adam", "host"):
        table.add_column(name, justify="right" if name != "stage" else "left", no_wrap=True)
    for stage in stages:
        held, beyond = stage.held, stage.activations
        passes = ["?"] * 4
        if beyond is not None:
            sizes = (beyond.forward, beyond.update, beyond.update_logits, beyond.optimizer)
            passes = [f"+{gib(size):.1f}" for size in sizes]
            passes[2] = f"{gib(beyond.update_logits):.1f}"  # of the update, not beside it
        table.add_row(
            f"{stage.role} {stage.number}",
            f"{held.parameters / 1e9:.2f} B",
            *(f"{gib(size):.1f}" for size in (held.weights, held.gradients, held.masters + held.moments)),
            *passes,
            f"{gib(max(one.host for one in stage.phases.values())):.1f}",
        )
    return table


def _places(places: list[Place], memory: float | None, *, known: bool) -> Table:
    """The total of each phase on each kind of device; a phase a column, or, where these are too many for the console, a
    row. `known`: activations are counted."""
    phases = list(dict.fromkeys(use.phase for place in places for use in place.uses))
    heads = ["on it", "devices", *(_SHORT.get(phase, phase) for phase in phases)]
    rows = []
    for place in places:
        totals = {use.phase: use.total for use in place.uses}
        rows.append([place.name, str(place.devices)])
        rows[-1] += [f"{gib(totals[phase]):.1f}" if phase in totals else "" for phase in phases]
        if memory is not None:
            left = memory - gib(place.peak.total)
            enough = f"{left:.1f} left" if known and place.not_counted is None else "not known"
            rows[-1].append(enough if left >= 0 else f"{-left:.1f} short")
    if memory is not None:
        heads.append(f"of {memory:g}")
    widths = [max(map(len, column)) + 1 for column in zip(heads, *rows, strict=True)]
    if sum(widths) >= _COLUMNS:
        heads, *rows = map(list, zip(*[["on it", "devices", *phases, *heads[2 + len(phases) :]], *rows], strict=True))
    table = _table("GiB of a device, by phase of a step")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _engine(section: str, rank: EngineRank) -> str:
    parts = [
        f"{section}, on each of {rank.devices} devices: {rank.parameters / 1e9:.2f} B parameters, weights "
        f"{gib(rank.weights):.1f} GiB, largest step {gib(rank.working):.1f}"
    ]
    if rank.cache is not None and rank.sequences is not None:
        tokens = rank.cache / rank.cache_per_token
        parts.append(
            f"KV cache {gib(rank.cache):.1f}: {tokens:,.0f} tokens, {rank.sequences:,.1f} sequences of the longest length"
        )
    return "; ".join(parts)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def gib(size: float) -> float:
    return size / 2**30
