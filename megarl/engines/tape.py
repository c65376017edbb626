"""The tape of an engine, which a replay repeats: the step at which each request and each update of the weights entered.

Hand-overs and copies of requests are on it, too. An engine samples the same tokens if the same requests and updates enter at the same of its steps (equal device, library
and float32 arithmetic; see docs/replay.md). A tape file has one JSON object per line. Each start of the run begins a
segment with its number; an event follows when it has entered::

    {"segment": 0, "after": 0}
    {"step": 0, "event": "update 0"}
    {"step": 0, "event": "requests 0-7 5d1f0a3c"}
    {"step": 61, "event": "update 1"}
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megarl.atomic_files import AppendFile
from megarl.types import GenerationRequest

C = TypeVar("C")
Record = dict[str, Any]
_REQUESTS = "requests "  # begins the events of `generate` calls
LOAD_EVENT = "load"  # of `load_weights`: it loads the weights of the last update before it
_COPY = "copy "  # begins the events of copies


class ReplayError(RuntimeError):
    """A replay differs from the recorded run."""


@dataclass(frozen=True)
class TapeSpec:
    """Tape of one process: the file, the segment that this start writes, and the recorded segment to repeat, if any.

    `fails`: the recorded run failed at the end of the segment. A replay goes on after the last record, until it fails.
    """

    path: str
    segment: int
    recorded: str | None = None
    recorded_segment: int = 0
    fails: bool = False


class TapeFile:
    """A tape file, open for one segment. FileNotFoundError without its folder, which the controller creates."""

    def __init__(self, path: Path | str, header: Record) -> None:
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"the folder {path.parent} of the run's tape does not exist on this machine. The controller has created it: "
                "set runs_dir to a folder that all machines share, under the same path."
            )
        torn = _is_torn(path)
        self._file = AppendFile(path)
        if torn:
            self._file.write(b"\n")
        self.write(header)

    def write(self, *records: Record) -> None:
        lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
        self._file.write(b"".join(lines))

    def close(self) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    """Return whether the last line of a file was cut short by a crash."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_segments(path: Path | str) -> dict[int, list[Record]]:
    """Return the records of each segment of a tape file, its header first. A line that a crash cut short is left out."""
    segments: dict[int, list[Record]] = {}
    records: list[Record] = []
    for line in Path(path).read_bytes().split(b"\n")[:-1]:  # after the last newline: nothing, or a torn line
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash, and continued by the next start
            continue
        if "segment" in record:
            records = segments[record["segment"]] = []
        records.append(record)
    return segments


def requests_event(requests: Sequence[GenerationRequest]) -> str:
    """Return the event of the requests of one `generate` call: their numbers, and a checksum of prompts, lengths, seeds and
    partial samples."""
    checksum = 0
    for request in requests:
        sampling = request.sampling
        settings = (request.group, request.seed, sampling.n, sampling.max_tokens, sampling.temperature)
        checksum = zlib.crc32(repr(settings).encode(), checksum)
        checksum = zlib.crc32(np.asarray(request.prompt.tokens, dtype="<i8").tobytes(), checksum)
        for partial in request.partials:
            checksum = zlib.crc32(repr((partial.spans, partial.finish_reason)).encode(), checksum)
            checksum = zlib.crc32(partial.tokens.astype("<i4").tobytes(), checksum)
            checksum = zlib.crc32(partial.log_probs.astype("<f4").tobytes(), checksum)
    groups = [request.group for request in requests]
    return f"{_REQUESTS}{min(groups)}-{max(groups)} {checksum:08x}"


def hand_over_event(groups: Collection[int] | None) -> str:
    """Return the event of a hand-over of `groups`; None: of all."""
    if groups is None:
        return "hand over all"
    return f"hand over {len(groups)} {zlib.crc32(repr(sorted(groups)).encode()):08x}"


def copy_event(number: int) -> str:
    """Return the event of a copy of the running requests, for a checkpoint. Each copy has another `number`."""
    return f"{_COPY}{number}"


def update_event(version: int) -> str:
    return f"update {version}"


class StepTape(Generic[C]):
    """Records at which step events enter an engine. In a replay, holds the command of each event until its recorded step.

    Use it from the engine's thread. `recorded`: pairs (step, event) in order; None: record only. `source`: where they are
    recorded, for messages. `fails`: as in `TapeSpec`.
    """

    def __init__(
        self,
        file: TapeFile | None = None,
        recorded: Sequence[tuple[int, str]] | None = None,
        source: str = "the recorded tape",
        fails: bool = False,
    ) -> None:
        self.steps = 0
        self._fails = fails
        self._file = file
        self._unwritten: list[Record] = []
        self._recorded = None if recorded is None else deque(recorded)
        self._source = source
        self._held: dict[str, deque[C]] = {}
        self._copied: set[str] = set()  # copies that have entered

    @staticmethod
    def of(spec: TapeSpec | None) -> StepTape[C]:
        """Open the tape of `spec`; None: neither record nor replay. Raises ReplayError if the recorded segment is missing."""
        if spec is None:
            return StepTape()
        recorded = None
        if spec.recorded is not None:
            segment = read_segments(spec.recorded).get(spec.recorded_segment)
            if segment is None:
                raise ReplayError(f"{spec.recorded} has no segment {spec.recorded_segment}")
            recorded = [(record["step"], record["event"]) for record in segment[1:]]
        source = f"segment {spec.recorded_segment} of {spec.recorded}"
        return StepTape(TapeFile(spec.path, {"segment": spec.segment}), recorded, source, spec.fails)

    def stepped(self) -> None:
        self.steps += 1

    def may_enter(self, event: str) -> bool:
        """Return whether the command of `event` may run now; always so without a replay. A copy may run if its recorded step has
        passed (`next_copy`), or if it is not recorded."""
        if self._recorded is None:
            return True
        if event.startswith(_COPY):
            return all(recorded != event for _, recorded in self._recorded)
        if self._recorded and self._recorded[0] == (self.steps, event):
            self._recorded.popleft()
            return True
        return not self._recorded and self._runs_on(event)

    def _runs_on(self, event: str) -> bool:
        """Return whether a command may run after the last record: an update or a pause of a run that failed before it had
        entered. Further requests may not, since they would change the batches of the last steps."""
        return self._fails and not event.startswith(_REQUESTS)

    def hold(self, event: str, command: C) -> None:
        """Keep a command until `next_held` returns it. Raises ReplayError for an update or a pause that is not recorded.

        Requests and loads may be missing at the end of a tape: a killed run sent them, and the engine had not received them.
        """
        self._held.setdefault(event, deque()).append(command)
        assert self._recorded is not None, "only a replay holds commands"
        may_be_missing = event.startswith(_REQUESTS) or event == LOAD_EVENT
        if not (may_be_missing or self._fails) and all(recorded != event for _, recorded in self._recorded):
            raise ReplayError(
                f"{self._source} has no further {event!r}, which arrived at the engine's step {self.steps}. The tape is "
                "incomplete (did its machine lose power?), or the replay differs from the recorded run"
            )

    def next_copy(self) -> str | None:
        """Return the next event if it is a copy at this step. A replay takes it without its command, which may arrive later, or
        never: a replay may leave saves out."""
        if not self._recorded or self._recorded[0][0] != self.steps or not self._recorded[0][1].startswith(_COPY):
            return None
        return self._recorded.popleft()[1]

    def take_held(self, event: str) -> Iterable[C]:
        """Return the held commands of `event`."""
        return self._held.pop(event, ())

    def next_held(self) -> C | None:
        """Return the held command of the next event, if this is its step."""
        if not self._recorded:
            late = next((event for event, commands in self._held.items() if commands and self._runs_on(event)), None)
            return None if late is None else self._held[late].popleft()
        if self._recorded[0][0] != self.steps or not self._held.get(self._recorded[0][1]):
            return None
        _, event = self._recorded.popleft()
        return self._held[event].popleft()

    def all_held(self) -> Iterator[C]:
        """Yield the commands that are held, for example at the end of the engine."""
        for commands in self._held.values():
            yield from commands

    @property
    def waits(self) -> bool:
        """True if an event of this step has not arrived, so that the engine must not step."""
        return bool(self._recorded) and self._recorded[0][0] == self.steps  # type: ignore[index]

    def check_idle(self) -> None:
        """Raise ReplayError if the engine has no request although the recorded engine went on stepping."""
        if self._recorded and self._recorded[0][0] > self.steps:
            step, event = self._recorded[0]
            raise ReplayError(
                f"the replay differs from the recorded run: no request runs at the engine's step {self.steps}, but in the "
                f"recorded run {event!r} entered at step {step}. Were libraries, device or number of threads different?"
            )

    def check_unrecorded(self) -> None:
        """Raise ReplayError if a held command's event is not among the recorded ones, while the engine waits for another."""
        recorded = {event for _, event in self._recorded or ()}
        unrecorded = next((event for event, commands in self._held.items() if commands and event not in recorded), None)
        if unrecorded is not None and self._recorded:
            raise ReplayError(
                f"the replay differs from the recorded run: {unrecorded!r} arrived, and {self._recorded[0][1]!r} is next at "
                f"step {self.steps}. Were libraries, device, number of threads or answers of tools different?"
            )

    def awaited(self) -> str | None:
        """Return a text about the recorded event for which the engine waits; None if it does not wait."""
        if not self.waits:
            return None
        assert self._recorded
        step, event = self._recorded[0]
        return f"the replay waits at the engine's step {step} for {event!r}, next in {self._source}"

    def entered(self, event: str) -> None:
        """Record that the command of `event` has run. Requests are written by `flush`, other events now, and each copy once."""
        if event in self._copied:
            return
        if event.startswith(_COPY):
            self._copied.add(event)
        if self._file is not None:
            self._unwritten.append({"step": self.steps, "event": event})
            if not event.startswith(_REQUESTS):
                self.flush()

    def flush(self) -> None:
        """Write the events that have entered, with a single write: call it before each step."""
        if self._file is not None and self._unwritten:
            records, self._unwritten = self._unwritten, []  # a write that fails is not repeated
            self._file.write(*records)

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self.flush()
        finally:
            self._file.close()
