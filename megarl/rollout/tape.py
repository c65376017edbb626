"""The tape of a run: the controller's actions in their order, next to the tapes of the engines. A replay repeats them.

Batches depend on the order in which groups arrive, and engines on the steps at which requests and updates enter. The tape
records both, as `tape/controller.jsonl` and a file per engine (`megarl.engines.tape`), and the verdicts of a judge
(`megarl.rollout.judge.tape`)::

    {"segment": 0, "format": 2, "after": 0, "resumed": null, "unlogged": false, "journal": false, "identity": {...}}
    {"version": 0}
    {"group": 3, "tokens": 812, "checksum": "5d1f0a3c"}
    {"loaded": 1, "weights": 1}
    {"newest": 1}
    {"saved": 0}
    {"ended": true}

A start of the run begins a segment. `format`: `TAPE_FORMAT` of the megarl that wrote it. `after`: the step that it resumed
after. `resumed`: the segment that saved this checkpoint. `unlogged`: that segment ended before it wrote the step's metrics.
`journal`: it began with a state of the journal (`train.journal`), which has no weights; a replay refuses it.
`identity`: of model, data and seed. With `rollout.at_update: finish`, `loaded` is the number of an engine that has loaded the
version `weights` from host memory, and `newest` the version that all engines load for an evaluation. With
`rollout.min_engines`, `died` is the number of an engine that has died, joined or left; a replay refuses it. A bundle of a failed step
(`megarl replay --bundle`) has `{"failed": 3}` as its last record.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from megarl.engines.base import engine_name
from megarl.engines.tape import Record, ReplayError, TapeFile, TapeSpec, read_segments
from megarl.rollout.judge.tape import Verdicts
from megarl.types import Group

A = TypeVar("A")
TAPE_FORMAT = 2
"""Number of the format of the tape, in the header of each segment. Segments without a number have format 1: they were written
before loads were recorded. Increase it with each change after which an older tape cannot be replayed."""
_ARRIVALS = ("group", "loaded")  # kinds of records that wait for an engine


@dataclass(frozen=True)
class TapeSegment:
    """A start of a run, from its tape. `records` without the header."""

    number: int
    after: int
    resumed: int | None
    unlogged: bool
    identity: Mapping[str, Any]
    records: Sequence[Record]
    format: int = TAPE_FORMAT
    journal: bool = False

    @property
    def ended(self) -> bool:
        """True if the run took its last step in this segment."""
        return bool(self.records) and "ended" in self.records[-1]

    @property
    def failed_step(self) -> int | None:
        """The step in which the run failed, which a bundle repeats; None otherwise."""
        return self.records[-1].get("failed") if self.records else None

    @property
    def last_step(self) -> int:
        """The last step after which the engines received new groups; `after` if there is none."""
        return max((record["version"] for record in self.records if "version" in record), default=self.after)


@dataclass(frozen=True)
class ReplayPlan:
    """The part of a run that a replay repeats: a segment, up to `last_step`. `logs_last`: the segment wrote this step's metrics.

    A segment that wrote the metrics of the step that it resumed after, and was then killed, has `last_step` = `after`.
    """

    segment: TapeSegment
    last_step: int | None  # None: the last step of the recipe
    logs_last: bool = True


def segments_of(folder: Path) -> list[TapeSegment]:
    """Return the segments of the tape in `folder`, in order of their starts."""
    path = folder / "controller.jsonl"
    if not path.is_file():
        return []
    return [
        TapeSegment(
            number,
            header["after"],
            header["resumed"],
            header["unlogged"],
            header["identity"],
            records,
            header.get("format", 1),
            header.get("journal", False),
        )
        for number, (header, *records) in sorted(read_segments(path).items())
    ]


def other_format(plans: Sequence[ReplayPlan]) -> str | None:
    """Return why segments of an older or newer format cannot be replayed; None if all have this megarl's."""
    other = next((plan.segment for plan in plans if plan.segment.format != TAPE_FORMAT), None)
    if other is None:
        return None
    age = "an earlier" if other.format < TAPE_FORMAT else "a later"
    return (
        f"segment {other.number} of the tape has format {other.format}, of {age} megarl, and this megarl replays format "
        f"{TAPE_FORMAT}"
    )


def with_deaths(plans: Sequence[ReplayPlan]) -> str | None:
    """Return why segments in which an engine died cannot be replayed; None if there are none."""
    for plan in plans:
        if (record := next((each for each in plan.segment.records if "died" in each), None)) is not None:
            return (
                f"{engine_name(record['died'])} died in segment {plan.segment.number} of the tape, or joined or left in it, so that groups went to "
                "other engines (rollout.min_engines)"
            )
    return None


def from_journal(plans: Sequence[ReplayPlan]) -> str | None:
    """Return why segments that began with a state of the journal cannot be replayed; None if there are none."""
    number = next((plan.segment.number for plan in plans if plan.segment.journal), None)
    if number is None:
        return None
    return f"segment {number} of the tape began from the journal (train.journal), so its first weights are in no checkpoint"


def history(segments: Sequence[TapeSegment]) -> list[ReplayPlan]:
    """Return the plans that repeat a run as its directory shows it, in order: segments that it abandoned are left out.

    The first plan begins after step 0, or at the checkpoint of a segment that is not on the tape.
    """
    if not segments:
        return []
    by_number = {segment.number: segment for segment in segments}
    chain = [segments[-1]]
    while (earlier := chain[0].resumed) in by_number and by_number[earlier].number < chain[0].number:
        chain.insert(0, by_number[earlier])
    plans = []
    for segment, following in itertools.pairwise(chain):
        logged_by = None if following.unlogged else _logged_by(segment, following, segments)
        plans.append(ReplayPlan(segment, following.after, logged_by is segment))
        if logged_by is not None and logged_by is not segment:
            plans.append(ReplayPlan(logged_by, following.after))
    last = chain[-1]
    if last.ended:
        return [*plans, ReplayPlan(last, None)]
    if last.failed_step is not None:
        return [*plans, ReplayPlan(last, last.failed_step)]
    began = last.unlogged or last.last_step > last.after
    return [*plans, ReplayPlan(last, last.last_step)] if began else plans


def _logged_by(segment: TapeSegment, following: TapeSegment, segments: Sequence[TapeSegment]) -> TapeSegment:
    """Return which segment wrote the metrics of the step between two segments: the first, or one that resumed after it, was
    killed later, and left nothing else."""
    between = [
        each
        for each in segments
        if segment.number < each.number < following.number and each.resumed == segment.number and each.unlogged
    ]
    return between[-1] if between and between[-1].after == following.after else segment


def segment_of_checkpoint(checkpoint: Path) -> int | None:
    """Return the segment that saved a checkpoint; None if it has no tape."""
    source = json.loads((checkpoint / "controller.json").read_text())["source"]
    return source.get("segment")


@dataclass(frozen=True)
class RunTape:
    """The tape that a start of a run writes, and the plan that it repeats, if any."""

    folder: Path
    header: Record
    recorded: Path | None = None
    plan: ReplayPlan | None = None

    def of_engine(self, name: str) -> TapeSpec:
        """Return the tape of the engine `name`, for its spec."""
        path = str(self.folder / f"{name}.jsonl")
        if self.plan is None or self.recorded is None:
            return TapeSpec(path, self.header["segment"])
        segment, recorded = self.plan.segment, str(self.recorded / f"{name}.jsonl")
        fails = segment.failed_step is not None
        return TapeSpec(path, self.header["segment"], recorded, segment.number, fails)

    def verdicts(self) -> Verdicts:
        """Open the file of the judge's verdicts."""
        records = () if self.plan is None else self.plan.segment.records
        return Verdicts.of(self.of_engine("judge"), {record["group"] for record in records if "group" in record})

    def arrivals(self) -> Arrivals[Any]:
        """Open the controller's file."""
        file = TapeFile(self.folder / "controller.jsonl", self.header)
        if self.plan is None or self.recorded is None:
            return Arrivals(file, self.header["segment"])
        segment = self.plan.segment
        source = f"segment {segment.number} of {self.recorded / 'controller.jsonl'}"
        return Arrivals(file, self.header["segment"], segment.records, source)


@dataclass(frozen=True)
class Arrival:
    """A group's arrival: the index of its engine, and whether the group may be trained on."""

    engine: int
    accepted: bool


@dataclass(frozen=True)
class Loaded:
    """An engine, by its index, that has loaded weights of `version` from host memory."""

    engine: int
    version: int


class Arrivals(Generic[A]):
    """Order in which the controller handles groups, loads of engines, weight versions and saves: recorded, and in a replay as
    recorded.

    Not thread-safe: the caller needs a lock. `recorded`: records of a segment; None: handle groups as they arrive.
    `source`: where they are recorded, for messages.
    """

    def __init__(
        self,
        file: TapeFile | None = None,
        segment: int | None = None,
        recorded: Sequence[Record] | None = None,
        source: str = "the recorded tape",
    ) -> None:
        self.segment = segment
        self._source = source
        self._file = file
        self._recorded = None if recorded is None else deque(recorded)
        self._arrived: dict[
            tuple[str, int], tuple[Group, A] | Loaded
        ] = {}  # by kind, and number of the group or engine

    def add(self, group: Group, note: A) -> None:
        """Add a group that has arrived. `due` returns it, with its note, when it is its turn."""
        self._arrived["group", group.number] = (group, note)

    def add_load(self, loaded: Loaded) -> None:
        """Add an engine that has loaded weights. `due` returns it when it is its turn."""
        self._arrived["loaded", loaded.engine] = loaded

    def due(self) -> Iterator[tuple[Group, A] | Loaded]:
        """Yield the groups and loads that are due. Raises ReplayError for one that differs from its record."""
        while (key := self._next_arrival()) is not None:
            arrival = self._arrived.pop(key)
            record = _record_of_load(arrival) if isinstance(arrival, Loaded) else _record_of(arrival[0])
            if self._recorded is not None:
                _check_equal(record, self._recorded.popleft())
            self._write(record)
            yield arrival

    def _next_arrival(self) -> tuple[str, int] | None:
        if self._recorded is None:
            return next(iter(self._arrived), None)
        following = self._recorded[0] if self._recorded else {}
        key = next(((kind, int(following[kind])) for kind in _ARRIVALS if kind in following), None)
        return key if key in self._arrived else None

    def check_more_groups(self) -> None:
        """Raise ReplayError if a batch lacks groups, but in the recorded run no further group arrived before the next step."""
        following = next((record for record in self._recorded or () if not {"saved", "loaded"} & record.keys()), {})
        if "failed" in following:  # an engine failed before a further group arrived, and does so again
            return
        if self._recorded is not None and "group" not in following:
            self._raise_missing("group", following)

    def may_take(self, record: Record) -> bool:
        """Return whether it is the turn of `record`, {"version": 3} or {"newest": 3}: all arrivals recorded before have been
        handled. The engines may then be given groups of this version, or load it for an evaluation.

        Raises ReplayError if it is not recorded next.
        """
        self._skip_saves()
        if self._recorded is None:
            return True
        following = self._recorded[0] if self._recorded else {}
        if not any(kind in following for kind in _ARRIVALS) and following != record:
            ((kind, version),) = record.items()
            self._raise_missing(f"{kind} {version}", following)
        return following == record

    def _raise_missing(self, needed: str, following: Record) -> NoReturn:
        end = f"continues with {json.dumps(following)}" if following else "ends"
        raise ReplayError(
            f"the replay needs a further record of a {needed}, but {self._source} {end} here. The tape is incomplete (did its "
            "machine lose power?), or the replay differs from the recorded run"
        )

    @property
    def stall_advice(self) -> str | None:
        """Advice for a replay in which no group finishes; None without a replay."""
        if self._recorded is None:
            return None
        return (
            "The engines' logs in the run's logs/ name the event of the recorded run for which an engine waits, if any: then "
            "the replay differs. Were libraries, device, number of threads or answers of tools different? Otherwise raise "
            "rollout.timeout if engines are slow."
        )

    def took(self, record: Record) -> None:
        """Write a record for which `may_take` returned True."""
        self._write(record)
        if self._recorded:
            self._recorded.popleft()

    def may_save(self, version: int | None) -> bool:
        """Return whether a state may be saved now: at its recorded place. A save that was not recorded has none."""
        if self._recorded is None or {"saved": version} not in self._recorded:
            return True
        return self._recorded[0] == {"saved": version}

    def saved(self, version: int | None) -> None:
        self._write({"saved": version})
        if self._recorded and self._recorded[0] == {"saved": version}:
            self._recorded.popleft()

    def died(self, engine: int) -> None:
        """Record that an engine has died, joined or left (`rollout.min_engines`). Such a segment cannot be replayed."""
        self._write({"died": engine})

    def ended(self) -> None:
        """Record that the run took its last step."""
        self._write({"ended": True})

    def _skip_saves(self) -> None:
        while self._recorded and "saved" in self._recorded[0]:
            self._recorded.popleft()

    def _write(self, record: Record) -> None:
        if self._file is not None:
            self._file.write(record)


def _record_of(group: Group) -> Record:
    """Return the record of a group: its number, its tokens, and a checksum of lengths and rewards."""
    lengths = [sample.length for sample in group.samples]
    checksum = zlib.crc32(repr([(sample.length, sample.reward) for sample in group.samples]).encode())
    return {"group": group.number, "tokens": sum(lengths), "checksum": f"{checksum:08x}"}


def _record_of_load(loaded: Loaded) -> Record:
    return {"loaded": loaded.engine, "weights": loaded.version}


def _check_equal(record: Record, recorded: Record) -> None:
    if record == recorded:
        return
    if "loaded" in record:
        raise ReplayError(
            f"engine {record['loaded']} has loaded version {record['weights']} of the weights, in the recorded run version "
            f"{recorded['weights']}: the tapes of the controller and of this engine do not belong together"
        )
    tokens = (
        f"{record['tokens']} tokens here and {recorded['tokens']} in the recorded run"
        if record["tokens"] != recorded["tokens"]
        else "other lengths of its samples, or other rewards, than in the recorded run"
    )
    raise ReplayError(
        f"group {record['group']} has {tokens}. A replay needs the same libraries, device and number of threads, and rewards "
        "and tools that give the same answers again"
    )
