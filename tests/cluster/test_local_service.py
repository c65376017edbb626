"""Services as child processes: calls, failures, and no orphans."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.cluster import CallFailed, ServiceDied, host_name
from megarl.cluster.devices import LocalDevices
from megarl.cluster.failures import Failure
from megarl.cluster.torchrun.local_service import LocalService
from tests.support.cluster_workers import ROOT, alive, wait_until


@pytest.fixture
def start(tmp_path):
    services = []

    def start(scale=3, **env):
        log = tmp_path / f"engine{len(services)}.log"
        services.append(
            LocalService(
                "tests.support.cluster_workers:Engine", (scale,), name=f"engine{len(services)}", log=log, env=env
            )
        )
        return services[-1]

    yield start
    for service in services:
        service.stop()


def test_calls_run_concurrently_and_return_to_their_callers(start):
    engine = start()
    futures = [engine.call("slow", i) for i in range(300)]
    assert [future.result(timeout=30) for future in futures] == list(range(300))
    assert engine.call("concurrency").result() == 300
    assert engine.call("scaled", 5).result() == 15
    assert engine.host == host_name()


def test_token_data_is_returned_as_a_reference(start):
    control, data = start().call_with_data("generate", 4).result(timeout=30)
    assert control == {"lengths": [4, 4]}
    assert [sample.tokens.tolist() for sample in data.get()] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_parts_are_returned_as_separate_references(start):
    engine = start()
    control, data = engine.call_with_parts("several", 4).result(timeout=30)
    assert control == [2, 2, 2]
    assert [[len(sample.tokens) for sample in each.get()] for each in data] == [[1, 1], [2, 2], [3, 3]]
    with pytest.raises(CallFailed, match="KeyError: 'no 2 parts'"):
        engine.call_with_parts("fail_parts", 2).result(timeout=30)


def test_a_call_that_raises_leaves_the_service_alive(start):
    engine = start()
    with pytest.raises(CallFailed, match=r"service engine0 on .* failed: KeyError: 'no such prompt'") as caught:
        engine.call("fail").result(timeout=30)
    assert "cluster_workers.py" in caught.value.failure.traceback
    with pytest.raises(CallFailed, match="AttributeError"):
        engine.call("no_such_method").result()
    with pytest.raises((TypeError, AttributeError)):
        engine.call("scaled", lambda: None)  # does not pickle
    assert engine.call("scaled", 1).result() == 3
    assert engine.alive()


def test_a_killed_service_fails_every_call_and_its_children_end(start):
    engine = start()
    _, child = engine.call("child_pid").result(timeout=30)
    waiting = [engine.call("slow", i) for i in range(3)]
    engine.call("die")
    began = time.monotonic()
    for future in waiting:
        with pytest.raises(ServiceDied, match=r"service engine0 .* died: .*SIGKILL(.|\n)*the engine's last words"):
            future.result(timeout=30)
    assert time.monotonic() - began < 3
    assert not engine.alive()
    with pytest.raises(ServiceDied):
        engine.call("scaled", 1).result()
    engine.stop()
    assert not alive(child)


def test_a_call_of_a_stopped_service_does_not_block(start):
    """The process does not read, and the message is larger than the buffers of a socket."""
    engine = start()
    assert engine.call("scaled", 1).result(timeout=30) == 3
    os.kill(engine.known_place.pid, signal.SIGSTOP)
    try:
        calls = ThreadPoolExecutor(1)
        future = calls.submit(engine.call, "scaled", "x" * (16 << 20)).result(timeout=10)
        assert not future.done() and engine.alive()
    finally:
        os.kill(engine.known_place.pid, signal.SIGCONT)
    assert len(future.result(timeout=30)) == 48 << 20
    os.kill(engine.known_place.pid, signal.SIGSTOP)
    waiting = engine.call("scaled", "x" * (16 << 20))
    engine.stop()
    with pytest.raises(ServiceDied, match="it was stopped"):
        waiting.result(timeout=10)


def test_a_constructor_that_raises_is_the_cause_of_death(start):
    with pytest.raises(ServiceDied, match="ValueError: scale is negative") as caught:
        start(scale=-1).call("scaled", 1).result(timeout=30)
    assert "scale is negative" in caught.value.failure.traceback


def test_stop_closes_the_object_and_ends_its_children(start, tmp_path):
    engine = start()
    _, child = engine.call("child_pid").result(timeout=30)
    engine.stop()
    assert not alive(child)
    assert "closed in order" in (tmp_path / "engine0.log").read_text()


def test_a_service_has_its_roles_environment(start, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    engine = start(ROLE="engine")
    assert [engine.call("variable", name).result(timeout=30) for name in ("ROLE", "RANK", "TORCHELASTIC_RUN_ID")] == [
        "engine",
        None,
        None,
    ]


CONTROLLER = """
import sys
from pathlib import Path
from megarl.cluster.torchrun.local_service import LocalService
engine = LocalService("tests.support.cluster_workers:Engine", (3,), name="engine", log=Path(sys.argv[1]))
print(*engine.call("child_pid").result(), flush=True)
engine.call("child_pid").result()
import time; time.sleep(1000)
"""


def test_all_processes_end_with_a_killed_controller(tmp_path):
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path / "log")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    assert wait_until(lambda: not any(map(alive, pids)), 10)


def test_local_devices(monkeypatch):
    monkeypatch.delenv("TEST_DEVICES", raising=False)
    devices = LocalDevices("TEST_DEVICES", [2, 3, 4])
    assert [devices.claim(2), devices.claim(1)] == [{"TEST_DEVICES": "2,3"}, {"TEST_DEVICES": "4"}]
    monkeypatch.setenv("TEST_DEVICES", "4,5,7")
    devices = LocalDevices("TEST_DEVICES", [1, 2, 3])
    assert devices.claim(2) == {"TEST_DEVICES": "5,7"}
    with pytest.raises(ValueError, match=r"needs 4 devices .* TEST_DEVICES=4,5,7 lists 3"):
        devices.claim(1)
    assert LocalDevices("", []).claim(3) == {}


def test_the_cause_of_a_killed_service_is_the_one_given(start):
    """A process that is stopped is killed because it is stopped."""
    engine = start()
    assert engine.call("scaled", 1).result(timeout=30) == 3
    because = Failure.death(engine.known_place, "its process has been stopped")
    engine.kill(because)
    assert wait_until(lambda: not engine.alive(), 10)
    with pytest.raises(ServiceDied, match="has been stopped"):
        engine.call("scaled", 1).result(timeout=10)
    assert engine.failure() == because and not engine.alive()


def test_sigquit_ends_a_service_of_a_background_job(start):
    """Shells ignore SIGQUIT in background jobs of scripts. SGLang's processes report a failure with it, which was lost."""
    action = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        engine = start()
    finally:
        signal.signal(signal.SIGQUIT, action)
    pid, _ = engine.call("child_pid").result(timeout=30)
    waiting = engine.call("slow", 1)
    os.kill(pid, signal.SIGQUIT)
    with pytest.raises(ServiceDied, match="SIGQUIT"):
        waiting.result(timeout=10)
