"""Engine groups: all engines step or none, for any order of calls, and no call to one leaves another waiting.

Collectives are barriers here: an engine that enters one alone breaks it, and the test fails."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.engines import group
from megarl.engines.base import EngineDead, EngineRefused, EngineSpec
from megarl.engines.loop import EngineLoop
from megarl.engines.vllm.engine import _VllmBackend
from megarl.engines.vllm.lockstep import StepTracker
from megarl.types import Completion, GenerationRequest, Prompt, Sampling

SIZE = 3
pytestmark = pytest.mark.timeout(60)


class Backend:
    """Finishes a request after `max_tokens` steps, each of which is one of all backends."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier, self.queue, self.steps = barrier, dict[str, list[Any]](), 0
        self.explode = self.down = False

    def join(self, group: group.EngineGroup) -> None: ...

    def start(self) -> dict[str, Any]:
        self.barrier.wait(5)
        return {}

    def admit(self, key: str, request: GenerationRequest) -> None:
        self.queue[key] = [request.sampling.max_tokens, request]

    def step(self) -> list[tuple[str, list[Completion]]]:
        if self.explode:
            raise MemoryError("no blocks left")
        self.barrier.wait(5)
        self.steps += 1
        for entry in self.queue.values():
            entry[0] -= 1
        done = [key for key, (left, _) in self.queue.items() if left == 0]
        for key in done:
            del self.queue[key]
        return [(key, [Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop")]) for key in done]

    def cancel(self, keys: list[str]) -> None:
        for key in keys:
            del self.queue[key]

    def shutdown(self) -> None:
        self.down = True


class Engines:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE)
        self.backends = [Backend(self.barrier) for _ in range(SIZE)]
        self.loops = [EngineLoop(backend, f"e{number}") for number, backend in enumerate(self.backends)]
        self.pool = ThreadPoolExecutor(32)
        self.rendezvous = group.Rendezvous("127.0.0.1")
        ranks = [dataclasses.replace(self.rendezvous.first, rank=rank, size=SIZE) for rank in range(SIZE)]
        starting = [self.pool.submit(loop.start, rank) for loop, rank in zip(self.loops, ranks, strict=True)]
        for start in starting:
            start.result(10)

    def generate(self, number: int, steps: int, count: int = 1) -> Future[None]:
        requests = [
            GenerationRequest(index, Prompt("p", (1,), "", "x"), Sampling(1, steps), seed=0) for index in range(count)
        ]
        return self.pool.submit(self.loops[number].generate, requests, lambda *_: None)

    def update(self, number: int) -> Future[list[int]]:
        """Run a collective command, like a weight update. Returns the number of steps of each engine before it."""

        def take() -> list[int]:
            self.barrier.wait(5)
            return [backend.steps for backend in self.backends]

        return self.pool.submit(lambda: self.loops[number].call(take, collective=True))

    def wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 5
        while self.backends[0].steps < count:
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        for ending in [self.pool.submit(loop.shutdown) for loop in self.loops]:
            ending.result(10)
        self.pool.shutdown()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setattr(group, "GRACE_SECONDS", 0.05)
    engines_of_group = Engines()
    yield engines_of_group
    engines_of_group.close()


def test_a_consequent_failure_names_the_first_failed_engine(engines: Engines) -> None:
    """Otherwise the first engine to report would be blamed, although it only lost its connection to the failed one."""

    def run_out() -> None:
        raise MemoryError("no room for the weights")

    def lose() -> None:
        time.sleep(0.02)
        raise RuntimeError("Connection closed by peer")

    first, *remaining = [
        engines.pool.submit(loop.call, command, collective=True)
        for loop, command in zip(engines.loops, (run_out, lose, lose), strict=True)
    ]
    for other in remaining:
        with pytest.raises(EngineDead, match=r"Earlier failure in its group: engine 'e0' .*no room for the weights"):
            other.result(10)
    with pytest.raises(MemoryError, match="no room"):
        first.result(10)


def test_an_engine_without_requests_steps_with_the_group(engines: Engines) -> None:
    long, short = engines.generate(0, 30), engines.generate(2, 5, count=4)
    short.result(10)
    assert not long.done()
    engines.generate(1, 3).result(10)  # enters while the others step
    long.result(10)
    time.sleep(0.03)
    steps = [backend.steps for backend in engines.backends]
    assert len(set(steps)) == 1 and not engines.barrier.broken
    time.sleep(0.03)
    assert steps == [backend.steps for backend in engines.backends]  # without requests no engine steps


def test_a_collective_call_waits_for_all_engines_while_steps_continue(engines: Engines) -> None:
    running = engines.generate(0, 10**6)
    first, second = engines.update(0), engines.update(2)
    steps = engines.backends[0].steps
    engines.wait_for_steps(steps + 20)
    assert not first.done() and not second.done()
    counts = [update.result(10) for update in (engines.update(1), first, second)]
    assert len({count for each in counts for count in each}) == 1  # between the same two steps in all
    engines.wait_for_steps(counts[0][0] + 5)
    engines.loops[0].abort()
    assert isinstance(running.exception(10), RuntimeError)


def test_many_updates_with_requests_in_between(engines: Engines) -> None:
    """Updates reach idle and busy engines in any order."""
    for round_ in range(10):
        running = [engines.generate(number, 1 + 3 * number) for number in range(SIZE) if number != round_ % SIZE]
        for update in [engines.update((number + round_) % SIZE) for number in range(SIZE)]:
            update.result(10)
        for call in running:
            call.result(10)
    assert not engines.barrier.broken


def test_one_paused_engine_pauses_the_group(engines: Engines) -> None:
    engines.loops[1].pause()
    running = engines.generate(0, 3)
    time.sleep(0.05)
    assert not running.done() and engines.backends[0].steps == 0
    engines.update(0), engines.update(1)
    engines.update(2).result(10)  # weights come while all are paused
    engines.loops[1].resume()
    running.result(10)


def test_sleep_counts_the_requests_of_the_whole_group(engines: Engines) -> None:
    """An engine without requests that slept alone would be stepped by the others, asleep."""

    def sleep(number: int) -> None:
        if engines.loops[number].running:
            raise EngineRefused(f"{engines.loops[number].running} run")

    def all_sleep() -> list[Future[None]]:
        return [
            engines.pool.submit(loop.call, lambda number=number: sleep(number), collective=True)
            for number, loop in enumerate(engines.loops)
        ]

    running = engines.generate(0, 10**6, count=2)
    engines.wait_for_steps(1)
    for call in all_sleep():
        with pytest.raises(EngineRefused, match="2 run"):
            call.result(10)
    engines.loops[0].abort()
    assert running.exception(10) is not None
    for call in all_sleep():
        call.result(10)


def test_a_failure_ends_all_engines_and_each_names_its_origin(engines: Engines) -> None:
    """The failing engine has no requests and steps for another. Its watchers still get the failure."""
    watching = [engines.pool.submit(loop.watch) for loop in engines.loops]
    engines.backends[2].explode = True
    running, update = engines.generate(0, 5), engines.update(1)
    engines.barrier.abort()  # the others' collective breaks, as when a process dies
    for call in (*watching, running, update):
        with pytest.raises(EngineDead):
            call.result(10)
    messages = [str(call.exception()) for call in watching]
    assert messages[2].startswith("engine 'e2' died: MemoryError: no blocks left")
    assert all(backend.down for backend in engines.backends)


def test_idle_engines_end_with_the_cause_of_a_failure(engines: Engines) -> None:
    def fail() -> None:
        raise ZeroDivisionError("half loaded")

    watching = [engines.pool.submit(loop.watch) for loop in engines.loops]
    with pytest.raises(ZeroDivisionError):
        engines.loops[1].call(fail)
    for number, call in enumerate(watching):
        with pytest.raises(EngineDead, match=f"engine 'e{number}' .*ZeroDivisionError: half loaded"):
            call.result(10)
    assert "Earlier failure in its group: engine 'e1' died: ZeroDivisionError" in str(watching[0].exception())


def test_a_shutdown_of_one_engine_ends_all_without_a_failure(engines: Engines) -> None:
    watching = [engines.pool.submit(loop.watch) for loop in engines.loops]
    running = engines.generate(0, 10**6)
    engines.wait_for_steps(1)
    engines.loops[1].shutdown()
    for call in watching:
        call.result(10)
    with pytest.raises(EngineDead, match="'e0' was shut down"):
        running.result(10)
    engines.loops[0].shutdown()


@pytest.mark.parametrize(
    ("running", "queue", "executes", "expected"),
    [
        (False, [], False, ["dummy"]),
        (True, [], True, ["step"]),
        (True, [], False, ["step", "dummy"]),  # nothing of its requests could be scheduled
        (False, ["of a step before"], False, ["step", "dummy"]),
    ],
)
def test_vllm_executes_the_model_once_in_each_step(
    running: bool, queue: list[str], executes: bool, expected: list[str]
) -> None:
    """Otherwise other engines' tokens would be combined with tokens of another step, or wait forever."""
    backend, done = _VllmBackend(EngineSpec("e0", "model", "float32", 8, data_parallel=2)), list[str]()
    core = SimpleNamespace(batch_queue=queue, step_fn=lambda: (done.append("step"), executes))
    client = SimpleNamespace(engine_core=core, execute_dummy_batch=lambda: done.append("dummy"))
    backend._engine = SimpleNamespace(engine_core=client, step=lambda: [core.step_fn()][:0])
    backend._steps, backend._running = StepTracker(core), {"0-0": None} if running else {}  # type: ignore[assignment]
    for _ in range(2):
        done.clear()
        assert backend.step() == [] and done == expected


def test_ports_in_a_row_are_free() -> None:
    import socket

    first = group.free_ports(4)
    for number in range(4):
        with socket.socket() as probe:
            probe.bind(("", first + number))
