"""The judge's verdicts on the tape of a run. A replay reads them, since the judge's batches depend on time.

`tape/judge.jsonl` has a line per judged group, in the order in which its verdicts arrived; a score is a number or a failure::

    {"segment": 0}
    {"group": 3, "scores": [0.8, {"scorer": "judge", ...}], "retries": [0, 2]}
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict

from megarl.engines.tape import Record, ReplayError, TapeFile, TapeSpec, read_segments
from megarl.rollout.judge.server import Judgement
from megarl.types import SampleFailure


class Verdicts:
    """Writes the verdicts of a run, and in a replay returns the recorded ones. Thread-safe."""

    def __init__(
        self, file: TapeFile, recorded: Sequence[Record] | None = None, arrived: Collection[int] = frozenset()
    ) -> None:
        """recorded: records of a segment; None: this run asks the judge. arrived: groups of training that the controller
        collected in this segment."""
        self._file, self._lock, self._arrived = file, threading.Lock(), arrived
        self._recorded: dict[int, deque[Record]] | None = None if recorded is None else {}
        for record in recorded or ():
            assert self._recorded is not None
            self._recorded.setdefault(record["group"], deque()).append(record)

    @staticmethod
    def of(spec: TapeSpec, arrived: Collection[int] = frozenset()) -> Verdicts:
        """Open the tape of `spec`. Raises ReplayError if the recorded segment is missing. arrived: see the constructor."""
        if spec.recorded is None:
            return Verdicts(TapeFile(spec.path, {"segment": spec.segment}))
        segment = read_segments(spec.recorded).get(spec.recorded_segment)
        if segment is None:
            raise ReplayError(f"{spec.recorded} has no segment {spec.recorded_segment}")
        return Verdicts(TapeFile(spec.path, {"segment": spec.segment}), segment[1:], arrived)

    @property
    def replays(self) -> bool:
        return self._recorded is not None

    def write(self, group: int, judgements: Sequence[Judgement]) -> None:
        """Record the judgements of a group's samples. Call it before the group is collected."""
        scores = [
            asdict(each.result) if isinstance(each.result, SampleFailure) else float(each.result) for each in judgements
        ]
        with self._lock:
            self._file.write({"group": group, "scores": scores, "retries": [each.retries for each in judgements]})

    def next(self, group: int) -> list[Judgement] | None:
        """Return the recorded judgements of a group; None after the last. The groups of an evaluation have the same
        numbers in each evaluation, and are returned in order.

        Raises ReplayError if the controller collected the group and the tape has no verdict on it.
        """
        assert self._recorded is not None, "only a replay has recorded verdicts"
        with self._lock:
            records = self._recorded.get(group)
            record = records.popleft() if records else None
        if record is None and group in self._arrived:
            raise ReplayError(
                f"group {group} has no recorded verdict of the judge, but the recorded run collected it: another scorer failed "
                "on it there and succeeded here, or the tape is incomplete. A replay needs scorers that give the same answers again"
            )
        if record is None:
            return None
        results = [SampleFailure(**score) if isinstance(score, dict) else score for score in record["scores"]]
        return [Judgement(result, retries) for result, retries in zip(results, record["retries"], strict=True)]
