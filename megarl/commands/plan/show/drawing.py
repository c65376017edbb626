"""Geometry of the page's charts: bars and pipeline schedules, as positions in percent of a line. Pure.

The charts are drawn when the page is written: the page needs no script and no chart library, which would be a hundred times
as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megarl.commands.plan.count.types import DeviceUses, Estimate, PhaseTime, RecipePlan
from megarl.commands.plan.show.estimate_table import seconds as in_seconds
from megarl.commands.plan.show.units import GIB, Unit
from megarl.commands.plan.time import pipeline
from megarl.commands.plan.time.cost import WORDS
from megarl.commands.plan.time.estimate import spans

COLOURS = 12  # distinct colours; further parts reuse them with hatching
_ROOM = 1.14  # line length relative to the longest bar, which has its number behind it
_FAR = 10.0  # relative to the longest bar: a device with more memory would make the bars invisible
_TICKS = 4, 8  # approximate number of ticks on a narrow and on a wide chart


class BarPiece(NamedTuple):
    """One coloured part of a bar. `number`: its position in the legend."""

    left: float
    width: float
    number: int
    title: str

    @property
    def colour(self) -> int:
        return self.number % COLOURS

    @property
    def hatched(self) -> bool:
        return self.number >= COLOURS


class BarRow(NamedTuple):
    name: str
    pieces: list[BarPiece]
    end: float
    text: str
    bad: bool = False


class Bars(NamedTuple):
    """A bar chart. `line`: the device's memory or the step's end; None: absent, or far outside."""

    rows: list[BarRow]
    ticks: list[tuple[float, str]]
    line: float | None


class DrawnPass(NamedTuple):
    left: float
    width: float
    kind: int  # of `Schedule.kinds`
    text: str


class Schedule(NamedTuple):
    """A pipeline schedule: a row of slots per stage. `width`: pixels that its numbers need. `kinds`: (name, backward, share of
    the background colour)."""

    role: str
    stages: list[list[DrawnPass]]
    kinds: list[tuple[str, bool, float]]
    chunks: int
    micro_batches: int
    estimated: bool  # the number of micro batches is estimated
    bubble: float
    fold: tuple[float, float] | None  # left and width
    hidden: float  # share of the time that is not drawn
    width: int


# ---- memory


def parts_of(places: Iterable[DeviceUses]) -> list[str]:
    """Return all parts of memory, for the legend."""
    return list(
        dict.fromkeys(part for place in places for use in place.uses for part, size in use.parts.items() if size)
    )


def memory(plan: RecipePlan, unit: Unit) -> list[Bars]:
    """Return a chart per place with a bar per phase, cut into parts; all charts have the same scale."""
    places = [place for place in plan.places if place.uses]
    parts = parts_of(places)
    most = max((use.total for place in places for use in place.uses), default=0)
    limit = plan.memory * GIB if plan.memory is not None else None
    drawn = limit if limit is not None and limit <= _FAR * most else None
    whole = max(most, drawn or 0, 1) * _ROOM
    charts = []
    for place in places:
        rows = []
        for use in place.uses:
            pieces = [(use.parts.get(part, 0), number, part) for number, part in enumerate(parts)]
            labelled = [
                (size, number, f"{use.phase}: {part} {unit.show(size)} {unit.name}") for size, number, part in pieces
            ]
            too_much = limit is not None and use.total > limit
            rows.append(_row(use.phase, 0.0, labelled, whole, unit.show(use.total), bad=too_much))
        line = None if drawn is None else _percent(drawn, whole)
        charts.append(Bars(rows, _ticks(whole / unit.size, _TICKS[0]), line))
    return charts


# ---- the phases of a step


def spent_on(estimate: Estimate) -> list[str]:
    """Return all causes of time, for the legend."""
    return list(dict.fromkeys(part for phase in estimate.phases for part in _spent(phase)))


def time(estimate: Estimate) -> Bars:
    """Return a chart with a bar per phase, from the begin of the phase, cut by cause."""
    parts, rows = spent_on(estimate), []
    ends = spans(estimate.phases)
    whole = max(estimate.seconds, *(end for _, end in ends)) * _ROOM
    for phase, (begin, _) in zip(estimate.phases, ends, strict=True):
        spent = _spent(phase)
        labelled = [
            (spent.get(part, 0.0), number, f"{phase.name}: {in_seconds(spent.get(part, 0.0))} of {part}")
            for number, part in enumerate(parts)
        ]
        rows.append(_row(phase.name, begin, labelled, whole, in_seconds(phase.seconds)))
    ticks = [(at, f"{text} s") for at, text in _ticks(whole, _TICKS[1])]
    return Bars(rows, ticks, _percent(estimate.seconds, whole))


def _spent(phase: PhaseTime) -> dict[str, float]:
    if not phase.parts:
        return {phase.bound: phase.seconds}
    return {WORDS[part]: seconds for part, seconds in phase.parts.items()}


# ---- the pipeline


def pipelines(plan: RecipePlan) -> list[str]:
    """Return the roles with a pipeline."""
    roles = [stage.role for stage in plan.stages]
    return [role for role in dict.fromkeys(roles) if roles.count(role) > 1]


def schedule(plan: RecipePlan, role: str) -> Schedule:
    of_role = [stage for stage in plan.stages if stage.role == role]
    stages, chunks = len(of_role), of_role[0].chunks
    estimated = plan.estimate is not None and role == "actor"
    micro_batches = plan.estimate.micro_batches if plan.estimate and estimated else 2 * stages
    window = pipeline.folded(pipeline.schedule(stages, chunks, micro_batches), _shown(stages))
    rows: list[list[DrawnPass]] = [[] for _ in of_role]
    for slot in window.slots:
        left, right = (_percent(at, window.length) for at in (slot.begin, slot.end))
        kind = int(slot.backward) * chunks + slot.chunk
        rows[slot.stage].append(DrawnPass(left, round(right - left, 3), kind, str(slot.micro_batch + 1)))
    of_chunk = [f", chunk {chunk + 1}" if chunks > 1 else "" for chunk in range(chunks)]
    pale = [0.65 * chunk / max(1, chunks - 1) for chunk in range(chunks)]
    digits = len(str(micro_batches))
    return Schedule(
        role=role,
        stages=rows,
        kinds=[
            (("backward" if backward else "forward") + of_chunk[chunk], backward, pale[chunk])
            for backward in (False, True)
            for chunk in range(chunks)
        ],
        chunks=chunks,
        micro_batches=micro_batches,
        estimated=estimated,
        bubble=pipeline.bubble(stages, chunks, micro_batches),
        fold=None if window.fold is None else _from_to(*window.fold, window.length),
        hidden=window.hidden / (window.length + window.hidden),
        width=round(window.length * chunks * (5.5 * digits + 5)),
    )


def _shown(stages: int) -> float:
    """Return the length of a shortened schedule: at both ends the pipeline fills completely, and a bit more."""
    return 2 * ((1 + pipeline.BACKWARD) * stages + 3)


# ---- positions on a line


def _row(
    name: str, begin: float, labelled: Sequence[tuple[float, int, str]], whole: float, text: str, *, bad: bool = False
) -> BarRow:
    """Return a row of pieces (length, number, title), one behind the other."""
    pieces, at = [], begin
    for length, number, title in labelled:
        if length:
            pieces.append(BarPiece(*_from_to(at, at + length, whole), number, title))
        at += length
    return BarRow(name, pieces, _percent(at, whole), text, bad)


def _from_to(begin: float, end: float, whole: float) -> tuple[float, float]:
    """Return (left, width) in percent."""
    left = _percent(begin, whole)
    return left, round(_percent(end, whole) - left, 3)


def _percent(at: float, whole: float) -> float:
    return round(100 * at / whole, 3)


def _ticks(whole: float, count: int) -> list[tuple[float, str]]:
    """Return round numbers from 0 to `whole`, about `count` of them, with their positions."""
    rough = whole / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= rough)
    return [(_percent(number * step, whole), f"{number * step:,.6g}") for number in range(math.floor(whole / step) + 1)]
