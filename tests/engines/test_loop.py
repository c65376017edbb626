"""The thread that owns an engine: admission, streaming, pausing, and how errors reach callers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megarl.engines import check_argument, create, engine_env
from megarl.engines.base import EngineDead, EngineRefused, GenerationAborted
from megarl.engines.loop import EngineLoop
from megarl.types import Completion, GenerationRequest, Prompt, Sampling


class FakeBackend:
    """Finishes a request after `max_tokens` steps. `batches` records who was running in each step."""

    def __init__(self):
        self.queue, self.batches, self.calls = {}, [], []
        self.explode = False
        self.gate = threading.Event()
        self.gate.set()

    def start(self):
        return {"engine": "fake"}

    def admit(self, key, request):
        time.sleep(0.002)  # time in which a step would slip in between
        self.queue[key] = [request.sampling.max_tokens, request]

    def step(self):
        self.gate.wait(5)
        if self.explode:
            raise MemoryError("no blocks left")
        self.batches.append([request.group for _, request in self.queue.values()])
        for entry in self.queue.values():
            entry[0] -= 1
        finished = [key for key, (left, _) in self.queue.items() if left == 0]
        return [(key, [self._completion(self.queue.pop(key)[1])]) for key in finished]

    @staticmethod
    def _completion(request):
        return Completion(np.array([request.group], np.int32), np.zeros(1, np.float32), "stop")

    def cancel(self, keys):
        for key in keys:
            del self.queue[key]

    def shutdown(self):
        self.calls.append("shutdown")


def request(group, steps=1):
    return GenerationRequest(group, Prompt(f"p{group}", (1,), "", "x"), Sampling(1, steps), seed=0)


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def engine(backend):
    engine = EngineLoop(backend, "e0")
    assert engine.start() == {"engine": "fake"}
    yield engine
    backend.gate.set()
    engine.shutdown()


def test_requests_of_one_call_enter_together_and_in_order(engine, backend):
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(engine.generate, [request(10 * c + i, 3) for i in range(5)], print) for c in range(4)]
        for call in calls:
            call.result(5)
    assert backend.batches
    for batch in backend.batches:
        whole = [10 * (group // 10) + i for group in batch[::5] for i in range(5)]
        assert batch == whole  # no step saw a part of a list, or another order


def test_finished_groups_are_returned_while_others_run(engine, backend):
    seen = []

    def on_finished(group, completions):
        seen.append((group, completions[0].tokens.tolist(), len(backend.queue), threading.current_thread().name))

    engine.generate([request(0, 9), request(1, 1), request(2, 4)], on_finished)
    assert [(group, tokens) for group, tokens, _, _ in seen] == [(1, [1]), (2, [2]), (0, [0])]
    assert {name for *_, name in seen} == {threading.current_thread().name}


def test_pause_stops_steps_and_not_admission(engine, backend):
    engine.pause()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, [request(0)], lambda *_: None)
        while not backend.queue:
            time.sleep(0.001)
        time.sleep(0.02)
        assert backend.batches == [] and not call.done()
        engine.resume()
        call.result(5)
    assert backend.batches == [[0]]


def test_the_running_step_is_known_while_it_hangs_and_not_between_steps(engine, backend):
    assert engine.running_step is None
    backend.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, [request(0, 2)], lambda *_: None)
        deadline = time.monotonic() + 5
        while engine.running_step is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert engine.running_step == 1
        backend.gate.set()
        call.result(5)
    assert engine.running_step is None
    engine.generate([request(1, 3)], lambda *_: None)
    assert engine.running_step is None and engine._steps == 5


def test_abort_ends_the_calls_and_frees_the_engine(engine, backend):
    engine.pause()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(engine.generate, [request(g, 3)], lambda *_: None) for g in range(2)]
        while len(backend.queue) < 2:
            time.sleep(0.001)
        engine.abort()
        for call in calls:
            with pytest.raises(GenerationAborted, match="'e0' aborted"):
                call.result(5)
    assert backend.queue == {}
    engine.resume()
    engine.generate([request(7)], lambda *_: None)


def test_a_failing_callback_cancels_only_its_call(engine, backend):
    def fail(group, completions):
        raise KeyError("scorer")

    with ThreadPoolExecutor(2) as pool:
        engine.pause()
        bad = pool.submit(engine.generate, [request(0, 1), request(1, 10**6)], fail)
        good = pool.submit(engine.generate, [request(2, 20)], lambda *_: None)
        while len(backend.queue) < 3:
            time.sleep(0.001)
        engine.resume()
        with pytest.raises(KeyError, match="scorer"):
            bad.result(5)
        good.result(5)
    assert backend.queue == {}


def test_a_failure_is_raised_in_all_current_and_later_calls(engine, backend):
    with ThreadPoolExecutor(3) as pool:
        backend.gate.clear()
        calls = [pool.submit(engine.generate, [request(0, 3)], lambda *_: None)]
        while not backend.queue:
            time.sleep(0.001)
        calls += [pool.submit(engine.generate, [request(1)], lambda *_: None), pool.submit(engine.pause)]
        time.sleep(0.02)
        backend.explode = True
        backend.gate.set()
        for call in calls:
            with pytest.raises(EngineDead, match="'e0' died: MemoryError: no blocks left"):
                call.result(5)
    for method in (engine.pause, engine.resume, engine.abort, lambda: engine.generate([request(2)], print)):
        with pytest.raises(EngineDead, match="no blocks left"):
            method()
    engine.shutdown()
    assert backend.calls == ["shutdown"]


def test_a_refusal_keeps_the_engine_alive_and_other_errors_end_it(engine):
    def refuse():
        raise EngineRefused("not now")

    def fail():
        raise ZeroDivisionError("half loaded")

    with pytest.raises(EngineRefused, match="not now"):
        engine.call(refuse)
    engine.generate([request(0)], lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        engine.call(fail)
    with pytest.raises(EngineDead, match="ZeroDivisionError: half loaded"):
        engine.pause()


def test_shutdown_ends_running_calls(engine, backend):
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, [request(0, 10**9)], lambda *_: None)
        while not backend.batches:
            time.sleep(0.001)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineDead, match="was shut down"):
            call.result(5)
    assert backend.calls == ["shutdown"]


def test_unknown_names_of_engines_and_arguments():
    with pytest.raises(ValueError, match=r"rollout.engine is 'vlm'.*did you mean 'vllm'"):
        create("vlm", None)
    with pytest.raises(ValueError, match=r"rollout.engine_args.max_num_seq: .*; did you mean 'max_num_seqs'\?$"):
        check_argument("max_num_seq", "rollout", "vLLM", ["max_num_seqs", "_max_num_seq"], {})
    with pytest.raises(ValueError, match=r"vLLM has no such engine argument; leave it out, or install"):
        check_argument("swap_space", "rollout", "vLLM", ["_api_process_rank", "max_num_seqs"], {})
    environment = engine_env("vllm", {"VLLM_LOGGING_LEVEL": "INFO"}, 3, {})
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"  # the platform has the last word
