"""The tape of an engine that keeps updates in host memory: a replay loads them at the recorded steps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.engines.backed import BackedEngine
from megarl.engines.base import EngineDead
from megarl.engines.tape import TapeFile, TapeSpec, read_segments, requests_event
from megarl.weight_sync.session import UpdateReport
from tests.engines.test_tape import CountingBackend, engine_of, request


class StagingBackend(CountingBackend):
    """Keeps each update but the first in host memory, as with `rollout.at_update: finish`."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: int | None = None

    def update_weights(self, version: int, running: int) -> UpdateReport:
        if not version:
            return super().update_weights(version, running)
        self.staged = version
        return UpdateReport(version, {}, 0, 0, 0, {})

    def load_weights(self, running: int) -> int:
        assert not running
        self.version = self.version if self.staged is None else self.staged
        return self.version


def test_a_replay_loads_the_same_version_before_the_same_step(tmp_path: Path) -> None:
    """A load and an update meet at a moment of time: the tape decides which version the load brings."""

    def play(engine: BackedEngine, load_waits: bool) -> list[int]:
        """Load while version 2 arrives; `load_waits`: the load arrives first, or the update."""
        loaded = []
        engine.update_weights(0)
        for version in (1, 2, 3):
            engine.generate([request(version, 4)], lambda *_: None)
            with ThreadPoolExecutor(2) as pool:
                calls = [
                    lambda version=version: engine.update_weights(version),
                    lambda: loaded.append(engine.load_weights()),
                ]
                for call in reversed(calls) if load_waits else calls:
                    pool.submit(call)
                    time.sleep(0.02)
        return loaded

    recorded = tmp_path / "recorded.jsonl"
    engine, backend = engine_of(TapeSpec(str(recorded), 0), StagingBackend())
    versions = play(engine, load_waits=True)
    engine.shutdown()
    assert versions == [0, 1, 2]
    assert [record["event"] for record in read_segments(recorded)[0][1:]].count("load") == 3
    again, repeated = engine_of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(recorded), 0), StagingBackend())
    assert play(again, load_waits=False) == versions
    again.shutdown()
    assert repeated.steps == backend.steps
    unordered, _ = engine_of(None, StagingBackend())
    assert play(unordered, load_waits=False) == [1, 2, 3], "the test can fail"
    unordered.shutdown()


@pytest.mark.parametrize("arrives_early", [False, True])
def test_a_replay_of_a_failed_run_goes_on_after_the_last_record(tmp_path: Path, arrives_early: bool) -> None:
    """The run failed during an update, which therefore has no record. Further requests would change the last batches."""
    tape = TapeFile(tmp_path / "tape.jsonl", {"segment": 0})
    tape.write({"step": 0, "event": "update 0"}, {"step": 0, "event": requests_event([request(0, 3)])})
    tape.close()
    spec = TapeSpec(str(tmp_path / "new.jsonl"), 0, str(tmp_path / "tape.jsonl"), 0, fails=True)
    engine, backend = engine_of(spec)
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(engine.update_weights, 1) if arrives_early else None
        time.sleep(0.05)
        engine.update_weights(0)
        engine.generate([request(0, 3)], lambda *_: None)
        (late or pool.submit(engine.update_weights, 1)).result(5)
        assert backend.version == 1
        further = pool.submit(engine.generate, [request(1, 3)], lambda *_: None)
        time.sleep(0.05)
        assert not further.done() and all(groups == [0] for _, groups in backend.steps)
        engine.shutdown()
        with pytest.raises(EngineDead):
            further.result(5)


def test_a_load_after_the_end_of_a_tape_waits(tmp_path: Path) -> None:
    """A killed run's controller sent it, and the engine was killed before it loaded."""
    path = tmp_path / "tape.jsonl"
    TapeFile(path, {"segment": 0}).close()
    engine, _ = engine_of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(path), 0), StagingBackend())
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.load_weights)
        time.sleep(0.05)
        assert not call.done()
        engine.shutdown()
        with pytest.raises(EngineDead, match="was shut down"):
            call.result(5)
