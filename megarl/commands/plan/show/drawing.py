"""What a plan's page draws: bars and a pipeline's schedule, as places on a line in percent of its length. Pure.

The page is drawn as it is written: it needs no script, and no library of charts, which would be a hundred times as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megarl.commands.plan.count.types import Estimate, PhaseTime, Place, Plan
from megarl.commands.plan.show.estimate_table import seconds as in_seconds
from megarl.commands.plan.show.units import GIB, Unit
from megarl.commands.plan.time import pipeline
from megarl.commands.plan.time.cost import WORDS
from megarl.commands.plan.time.estimate import spans

COLOURS = 12  # told apart; what comes after them has the same, hatched
_ROOM = 1.14  # of the longest bar: its number stands behind it
_FAR = 10.0  # times the longest bar: a device so much larger would leave the bars nothing to be seen of
_TICKS = 4, 8  # about, of a narrow chart and of a wide one


class Piece(NamedTuple):
    """`number`: of what it stands for, in the legend."""

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


class Row(NamedTuple):
    name: str
    pieces: list[Piece]
    end: float
    text: str
    bad: bool = False


class Bars(NamedTuple):
    """`line`: the device's memory, or the step's end; None: there is none, or it is far outside."""

    rows: list[Row]
    ticks: list[tuple[float, str]]
    line: float | None


class Slot(NamedTuple):
    left: float
    width: float
    kind: int  # of `Schedule.kinds`
    text: str


class Schedule(NamedTuple):
    """A row of slots for each stage. `width`: pixels that its numbers need. `kinds`: (name, backward, share of the card's
    colour mixed in)."""

    role: str
    stages: list[list[Slot]]
    kinds: list[tuple[str, bool, float]]
    chunks: int
    micro_batches: int
    known: bool  # how many micro batches there are
    bubble: float
    fold: tuple[float, float] | None  # left and width
    hidden: float  # share of the time that is left out
    width: int


# ---- memory


def parts_of(places: Iterable[Place]) -> list[str]:
    """What takes memory anywhere: the legend."""
    return list(
        dict.fromkeys(part for place in places for use in place.uses for part, size in use.parts.items() if size)
    )


def memory(plan: Plan, unit: Unit) -> list[Bars]:
    """Of each place a bar for each phase, cut into parts; all to the same scale."""
    places = [place for place in plan.places if place.uses]
    parts = parts_of(places)
    most = max((use.total for place in places for use in place.uses), default=0)
    limit = plan.memory * GIB if plan.memory is not None else None
    drawn = limit if limit is not None and limit <= _FAR * most else None
    whole = max(most, drawn or 0, 1) * _ROOM
    found = []
    for place in places:
        rows = []
        for use in place.uses:
            pieces = [(use.parts.get(part, 0), number, part) for number, part in enumerate(parts)]
            told = [
                (size, number, f"{use.phase}: {part} {unit.show(size)} {unit.name}") for size, number, part in pieces
            ]
            too_much = limit is not None and use.total > limit
            rows.append(_row(use.phase, 0.0, told, whole, unit.show(use.total), bad=too_much))
        line = None if drawn is None else _percent(drawn, whole)
        found.append(Bars(rows, _ticks(whole / unit.size, _TICKS[0]), line))
    return found


# ---- the phases of a step


def spent_on(estimate: Estimate) -> list[str]:
    """What phases spend their time on: the legend."""
    return list(dict.fromkeys(part for phase in estimate.phases for part in _spent(phase)))


def time(estimate: Estimate) -> Bars:
    """Of each phase a bar from where it begins, cut into what its seconds are spent on."""
    parts, rows = spent_on(estimate), []
    ends = spans(estimate.phases)
    whole = max(estimate.seconds, *(end for _, end in ends)) * _ROOM
    for phase, (begin, _) in zip(estimate.phases, ends, strict=True):
        spent = _spent(phase)
        told = [
            (spent.get(part, 0.0), number, f"{phase.name}: {in_seconds(spent.get(part, 0.0))} of {part}")
            for number, part in enumerate(parts)
        ]
        rows.append(_row(phase.name, begin, told, whole, in_seconds(phase.seconds)))
    ticks = [(at, f"{text} s") for at, text in _ticks(whole, _TICKS[1])]
    return Bars(rows, ticks, _percent(estimate.seconds, whole))


def _spent(phase: PhaseTime) -> dict[str, float]:
    if not phase.parts:
        return {phase.bound: phase.seconds}
    return {WORDS[part]: seconds for part, seconds in phase.parts.items()}


# ---- the pipeline


def pipelines(plan: Plan) -> list[str]:
    """Who has one."""
    roles = [stage.role for stage in plan.stages]
    return [role for role in dict.fromkeys(roles) if roles.count(role) > 1]


def schedule(plan: Plan, role: str) -> Schedule:
    own = [stage for stage in plan.stages if stage.role == role]
    stages, chunks = len(own), own[0].chunks
    known = plan.estimate is not None and role == "actor"
    micro_batches = plan.estimate.micro_batches if plan.estimate and known else 2 * stages
    window = pipeline.folded(pipeline.schedule(stages, chunks, micro_batches), _shown(stages))
    rows: list[list[Slot]] = [[] for _ in own]
    for slot in window.slots:
        left, right = (_percent(at, window.length) for at in (slot.begin, slot.end))
        kind = int(slot.backward) * chunks + slot.chunk
        rows[slot.stage].append(Slot(left, round(right - left, 3), kind, str(slot.micro_batch + 1)))
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
        known=known,
        bubble=pipeline.bubble(stages, chunks, micro_batches),
        fold=None if window.fold is None else _from_to(*window.fold, window.length),
        hidden=window.hidden / (window.length + window.hidden),
        width=round(window.length * chunks * (5.5 * digits + 5)),
    )


def _shown(stages: int) -> float:
    """So much of a schedule that at either end the pipeline is seen to be full, and some of what it does then."""
    return 2 * ((1 + pipeline.BACKWARD) * stages + 3)


# ---- places on a line


def _row(
    name: str, begin: float, told: Sequence[tuple[float, int, str]], whole: float, text: str, *, bad: bool = False
) -> Row:
    """Pieces of (length, number, title), one behind the other."""
    pieces, at = [], begin
    for length, number, title in told:
        if length:
            pieces.append(Piece(*_from_to(at, at + length, whole), number, title))
        at += length
    return Row(name, pieces, _percent(at, whole), text, bad)


def _from_to(begin: float, end: float, whole: float) -> tuple[float, float]:
    """(left, width)."""
    left = _percent(begin, whole)
    return left, round(_percent(end, whole) - left, 3)


def _percent(at: float, whole: float) -> float:
    return round(100 * at / whole, 3)


def _ticks(whole: float, count: int) -> list[tuple[float, str]]:
    """Round numbers from 0 to `whole`, at most `count` beside the 0, and where they stand."""
    rough = whole / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= rough)
    return [(_percent(number * step, whole), f"{number * step:,.6g}") for number in range(math.floor(whole / step) + 1)]
