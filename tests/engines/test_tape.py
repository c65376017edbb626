"""The tape of an engine: in a replay, requests and updates enter at the recorded steps, whenever they arrive."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.engines.backed import BackedEngine
from megarl.engines.base import EngineDead, EngineSpec
from megarl.engines.tape import StepTape, TapeFile, TapeSpec, read_segments, requests_event
from megarl.types import Completion, GenerationRequest, Prompt, Sampling
from megarl.weight_sync.session import UpdateReport


class CountingBackend:
    """Finishes a request after `max_tokens` steps, and records the groups of each step with the weights' version."""

    unloaded = None
    staged = None
    ended = False

    def __init__(self) -> None:
        self.version = 0
        self.asleep: tuple[str, ...] = ()
        self.left: dict[str, list[Any]] = {}
        self.steps: list[tuple[int, list[int]]] = []

    def start(self) -> dict[str, Any]:
        return {}

    def check(self, request: GenerationRequest) -> None:
        pass

    def admit(self, key: str, request: GenerationRequest) -> None:
        self.left[key] = [request.sampling.max_tokens, request.group]

    def step(self) -> list[tuple[str, list[Completion]]]:
        time.sleep(0.0005)
        self.steps.append((self.version, [group for _, group in self.left.values()]))
        for entry in self.left.values():
            entry[0] -= 1
        done = [key for key, (left, _) in self.left.items() if left == 0]
        for key in done:
            del self.left[key]
        return [(key, [Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop")]) for key in done]

    def lengths(self, key: str) -> dict[int, int]:
        return {0: 1}

    def update_weights(self, version: int, running: int) -> UpdateReport:
        self.version = version
        return UpdateReport(version, {}, 0, 0, 0, {})

    def sleep(self, running: int) -> None:
        self.asleep = ("weights", "kv_cache")

    def wake(self, tags: Sequence[str] | None) -> None:
        self.asleep = tuple(tag for tag in self.asleep if tags is not None and tag not in tags)

    def shutdown(self) -> None:
        self.ended = True


def request(group: int, steps: int) -> GenerationRequest:
    return GenerationRequest(group, Prompt(f"p{group}", (1, group), "", "x"), Sampling(1, steps), seed=group)


def engine_of(tape: TapeSpec | None, backend: CountingBackend | None = None) -> tuple[BackedEngine, CountingBackend]:
    backend = backend or CountingBackend()
    spec = EngineSpec("engine0", "model", "float32", 64, at_update="refresh", tape=tape)
    engine = BackedEngine(backend, spec)  # type: ignore[arg-type]
    engine.start()
    return engine, backend


def play(engine: BackedEngine, order: random.Random) -> None:
    """Send twelve calls and two updates at random moments."""
    with ThreadPoolExecutor(16) as pool:
        calls = []
        for number in range(12):
            requests = [request(10 * number + part, 3 + (7 * number + part) % 20) for part in range(2)]
            calls.append(pool.submit(engine.generate, requests, lambda *_: None))
            time.sleep(order.random() * 0.01)
            if number in (4, 8):
                calls.append(pool.submit(engine.update_weights, number))
        for call in calls:
            call.result(20)


def test_a_replay_repeats_every_step(tmp_path: Path) -> None:
    recorded, repeated = tmp_path / "recorded.jsonl", tmp_path / "repeated.jsonl"
    engine, backend = engine_of(TapeSpec(str(recorded), 0))
    play(engine, random.Random(1))
    engine.shutdown()
    for seed in (2, 3):  # other moments
        again, steps = engine_of(TapeSpec(str(repeated), seed, str(recorded), 0))
        play(again, random.Random(seed))
        again.shutdown()
        assert steps.steps == backend.steps
    first, second = read_segments(repeated)[2], read_segments(repeated)[3]
    assert first[1:] == second[1:] == read_segments(recorded)[0][1:]
    assert {len(json.dumps(record)) < 80 for record in first} == {True}


def test_other_moments_give_other_steps_without_a_replay() -> None:
    """The test above can fail: moments decide what runs together."""
    seen = []
    for seed in (1, 2, 3):
        engine, backend = engine_of(None)
        play(engine, random.Random(seed))
        engine.shutdown()
        seen.append(backend.steps)
    assert seen[0] != seen[1] or seen[1] != seen[2]


def test_a_replay_ends_if_requests_end_too_early(tmp_path: Path) -> None:
    """The recorded engine went on stepping at this point: the replay samples other tokens."""
    path = tmp_path / "tape.jsonl"
    tape = TapeFile(path, {"segment": 0})
    tape.write({"step": 0, "event": requests_event([request(0, 5)])})
    tape.write({"step": 9, "event": "update 1"})
    tape.close()
    engine, _ = engine_of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(path), 0))
    engine.generate([request(0, 5)], lambda *_: None)
    with pytest.raises(EngineDead, match=r"step 5.*'update 1' entered at step 9"):
        engine.watch()


def replay_of_a_request(folder: Path, number: int) -> BackedEngine:
    """Return an engine that repeats a tape with one request, of group `number`, before the first step."""
    tape = TapeFile(folder / "tape.jsonl", {"segment": 0})
    tape.write({"step": 0, "event": requests_event([request(number, 5)])})
    tape.close()
    engine, _ = engine_of(TapeSpec(str(folder / "new.jsonl"), 0, str(folder / "tape.jsonl"), 0))
    return engine


def test_a_replay_ends_if_other_requests_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.engines.loop._REPLAY_SECONDS", 0.1)
    engine = replay_of_a_request(tmp_path, 0)
    with pytest.raises(EngineDead, match=r"'requests 1-1 .*' arrived, and 'requests 0-0"):
        engine.generate([request(1, 5)], lambda *_: None)


def test_requests_after_the_end_of_a_tape_wait(tmp_path: Path) -> None:
    """A killed run has no record of them, and its replay ends before it needs their samples."""
    path = tmp_path / "tape.jsonl"
    TapeFile(path, {"segment": 0}).close()
    engine, backend = engine_of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(path), 0))
    errors = []

    def late() -> None:
        try:
            engine.generate([request(1, 5)], lambda *_: None)
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    time.sleep(0.05)
    assert backend.steps == [] and thread.is_alive()
    engine.shutdown()
    thread.join(5)
    assert len(errors) == 1


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'{"segment":0}\n{"step":0,"event":"update 0"}\n{"step":4,"ev')
    assert read_segments(path) == {0: [{"segment": 0}, {"step": 0, "event": "update 0"}]}
    TapeFile(path, {"segment": 1}).close()
    assert read_segments(path)[1] == [{"segment": 1}], "the next start begins a new line"


def test_events_differ_by_prompt_seed_and_length() -> None:
    first = requests_event([request(0, 5)])
    assert first == requests_event([request(0, 5)])
    variants = [
        GenerationRequest(0, Prompt("p0", (1, 2), "", "x"), Sampling(1, 5), seed=0),
        GenerationRequest(0, Prompt("p0", (1, 0), "", "x"), Sampling(1, 5), seed=1),
        GenerationRequest(0, Prompt("p0", (1, 0), "", "x"), Sampling(1, 6), seed=0),
    ]
    assert len({first, *map(requests_event, ([other] for other in variants))}) == 4


@pytest.mark.parametrize("fails", ["update", "requests"])
def test_a_tape_that_cannot_be_written_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Every caller receives the error; none waits for ever."""
    write = TapeFile.write

    def full(self: TapeFile, *records: Any) -> None:
        if any(record.get("event", "").startswith(fails) for record in records):
            raise OSError("no space")
        write(self, *records)

    monkeypatch.setattr(TapeFile, "write", full)
    engine, backend = engine_of(TapeSpec(str(tmp_path / "tape.jsonl"), 0))
    with ThreadPoolExecutor(4) as pool:
        watch = pool.submit(engine.watch)
        if fails == "update":
            calls = [pool.submit(engine.generate, [request(0, 1 << 30)], lambda *_: None)]
            while not backend.steps:
                time.sleep(0.001)
            calls.append(pool.submit(engine.update_weights, 1))
        else:
            calls = [pool.submit(engine.generate, [request(0, 5)], lambda *_: None)]
        for call in [*calls, watch]:
            with pytest.raises((EngineDead, OSError), match="no space"):
                call.result(5)
    engine.shutdown()
    assert backend.ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tape_that_cannot_be_closed_answers_all_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may report a full disk when a file is closed."""

    def full(self: TapeFile) -> None:
        raise OSError("no space")

    monkeypatch.setattr(TapeFile, "close", full)
    engine, backend = engine_of(TapeSpec(str(tmp_path / "tape.jsonl"), 0))
    with ThreadPoolExecutor(2) as pool:
        watch = pool.submit(engine.watch)
        call = pool.submit(engine.generate, [request(0, 1 << 30)], lambda *_: None)
        while not backend.steps:
            time.sleep(0.001)
        engine.shutdown()
        with pytest.raises(EngineDead, match="was shut down"):
            call.result(5)
        watch.result(5)
    assert backend.ended


def test_events_are_written_before_the_step_that_they_enter(tmp_path: Path) -> None:
    """A killed engine leaves every request that it has sampled for, with one write for all of a step."""
    path = tmp_path / "tape.jsonl"
    tape: StepTape[Any] = StepTape(TapeFile(path, {"segment": 0}))
    tape.entered("requests 0-0 1")
    tape.entered("requests 1-1 2")
    assert len(read_segments(path)[0]) == 1
    tape.flush()
    assert len(read_segments(path)[0]) == 3
    tape.entered("update 1")  # its caller continues at once
    assert read_segments(path)[0][-1] == {"step": 0, "event": "update 1"}

    written: list[int] = []

    class Checking(CountingBackend):
        def step(self) -> list[tuple[str, list[Completion]]]:
            written.append(len(read_segments(tmp_path / "engine.jsonl")[0]))
            return super().step()

    engine, _ = engine_of(TapeSpec(str(tmp_path / "engine.jsonl"), 0), Checking())
    engine.generate([request(0, 2)], lambda *_: None)
    engine.shutdown()
    assert written == [2, 2]


def test_an_update_past_the_end_of_a_tape_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    tape = TapeFile(path, {"segment": 4})
    tape.write({"step": 0, "event": "update 0"})
    tape.close()
    engine, backend = engine_of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(path), 4))
    engine.update_weights(0)
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineDead, match=r"segment 4 of .*tape\.jsonl.*'update 1'"):
        pool.submit(engine.update_weights, 1).result(5)
    assert backend.version == 0


def test_a_waiting_replay_prints_the_next_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample ended without its recorded next turn: nothing arrives, so that nothing can be found to differ."""
    monkeypatch.setattr("megarl.engines.loop._REPLAY_SECONDS", 0.02)
    engine = replay_of_a_request(tmp_path, 7)
    time.sleep(0.2)
    engine.shutdown()
    assert capsys.readouterr().out.count("the replay waits at the engine's step 0 for 'requests 7-7 ") == 1


def test_a_replay_sleeps_and_wakes_at_the_recorded_steps(tmp_path: Path) -> None:
    """Colocated engines sleep with running requests; a request may arrive meanwhile."""

    def nap(engine: BackedEngine, order: random.Random) -> None:
        with ThreadPoolExecutor(16) as pool:
            calls = []
            for number in range(6):
                calls.append(pool.submit(engine.generate, [request(number, 10 + number)], lambda *_: None))
                time.sleep(order.random() * 0.01)
                if number in (2, 4):
                    engine.sleep()
                    calls.append(pool.submit(engine.generate, [request(10 + number, 5)], lambda *_: None))
                    engine.wake(["weights"])
                    engine.update_weights(number)
                    time.sleep(order.random() * 0.01)
                    engine.wake(["kv_cache"])
            for call in calls:
                call.result(20)

    recorded = tmp_path / "recorded.jsonl"
    engine, backend = engine_of(TapeSpec(str(recorded), 0))
    engine.update_weights(0)
    nap(engine, random.Random(1))
    engine.shutdown()
    events = [record["event"] for record in read_segments(recorded)[0][1:]]
    assert events.count("pause") == events.count("resume") == 2
    for seed in (2, 3, 4):
        again, repeated = engine_of(TapeSpec(str(tmp_path / "repeated.jsonl"), seed, str(recorded), 0))
        again.update_weights(0)
        nap(again, random.Random(seed))
        again.shutdown()
        assert repeated.steps == backend.steps
        assert read_segments(tmp_path / "repeated.jsonl")[seed][1:] == read_segments(recorded)[0][1:]


def test_an_engine_does_not_create_the_folder_of_the_tape(tmp_path: Path) -> None:
    """On a machine that does not share it, the tape would be lost."""
    with pytest.raises(FileNotFoundError, match=r"does not exist on this machine.*set runs_dir"):
        TapeFile(tmp_path / "tape" / "engine0.jsonl", {"segment": 0})
    assert not (tmp_path / "tape").exists()


def test_a_start_does_not_read_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'{"segment":0}\n')
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it may be long"))
    TapeFile(path, {"segment": 1}).close()
    monkeypatch.undo()
    assert path.read_bytes() == b'{"segment":0}\n{"segment":1}\n'
