"""Processes that are stopped or killed before they have reported their place: found by their mark, and named."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.cluster import sigstop_watch
from megarl.cluster.failures import ProcessInfo, ServiceDied, WorkerFailed, host_name
from megarl.cluster.ray import env as ray_env
from megarl.cluster.starting import VARIABLE, StartingProcess, find_starting, new_mark

ray_env.prepare(private=True)

from megarl.cluster.ray import start_watch  # noqa: E402 -- after the variables that Ray reads at import
from megarl.cluster.ray.start_watch import GONE_LOOKS, StartWatch  # noqa: E402
from tests.support.ray_services import ENGINE_ENV  # noqa: E402

PLACE = ProcessInfo("service engine0", "10.0.0.1", log="/logs/engine0.log")
PROCESS = StartingProcess("machine", 7, "S", "/tmp/ray/worker-7.err")


def test_a_process_is_found_by_its_environment_or_arguments_and_not_by_its_child(tmp_path: Path) -> None:
    first, second, absent = new_mark(), new_mark(), new_mark()
    parent = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with (tmp_path / "err").open("w") as err:
        marked = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, VARIABLE: first}, stderr=err)
        launcher = subprocess.Popen(["sh", "-c", "sleep 60; :", f'--context={{"{VARIABLE}": "{second}"}}'])
    try:
        assert eventually(lambda: len(psutil.Process(marked.pid).children()) == 1)
        assert eventually(lambda: len(find_starting([first, second])) == 2)
        found = find_starting([first, second, absent])
        assert {mark: process.pid for mark, process in found.items()} == {first: marked.pid, second: launcher.pid}
        assert (found[first].host, found[first].log) == (host_name(), str(tmp_path / "err"))
        marked.send_signal(signal.SIGSTOP)
        assert eventually(lambda: find_starting([first])[first].state == "T")
    finally:
        for process in (marked, launcher):
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)])
            process.kill()
            process.wait()
    assert find_starting([first, second]) == {}


class Looks:
    """A watch on this machine with looks that the test decides, each at its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.process = 0.0, dict[str, StartingProcess]()
        monkeypatch.setattr(start_watch, "find_starting", lambda marks: self.process)
        monkeypatch.setattr(start_watch.time, "monotonic", lambda: self.now)
        self.watch = StartWatch(private=True, limit=300.0)

    def look(self, *processes: StartingProcess | None) -> Any:
        for process in processes:
            self.now += sigstop_watch.LOOK_SECONDS
            self.process = {} if process is None else {"mark": process}
            self.watch.look({"mark": "node"})
        return self.watch.failure("mark", PLACE)


def test_a_process_that_stays_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, stopped = Looks(monkeypatch), StartingProcess("machine", 7, "T", "")
    assert looks.look(*[stopped] * (sigstop_watch.LOOKS - 1), PROCESS, *[stopped] * (sigstop_watch.LOOKS - 1)) is None
    failure = looks.look(stopped)
    assert str(failure.place) == "service engine0 on machine (pid 7)"
    assert not failure.place.log, "the file of the earlier process is not this one's output"
    assert failure.cause.startswith("its process has been stopped for 20 s before it has reported its start")


def test_a_process_that_has_ended_fails_unless_another_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends a process that has not registered for a minute, and starts another one."""
    looks, other = Looks(monkeypatch), StartingProcess("machine", 8, "S", "")
    assert looks.look(*[None] * 10) is None, "Ray has not started it yet"
    assert looks.look(PROCESS, *[None] * (GONE_LOOKS - 1), other) is None
    assert looks.watch.place("mark", PLACE).pid == 8
    failure = looks.look(*[None] * GONE_LOOKS)
    assert failure.died and str(failure).startswith("service engine0 on machine (pid 8) died: its process ended before")
    looks.watch.look({})
    looks.now += 10
    looks.watch.look({"later": "node"})
    assert looks.watch.failure("mark", PLACE) is None, "marks of processes that do not start any more are forgotten"


def test_a_long_start_is_reported_every_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = Looks(monkeypatch)
    with caplog.at_level(logging.WARNING):
        looks.look(None)
        looks.now = 61.0
        looks.look(None)
        looks.now = 121.0
        looks.look(PROCESS)
        looks.look(PROCESS)
    first, second = caplog.messages
    assert first.startswith(
        "megarl has waited 61 s for the start of service engine0 on 10.0.0.1, and waits for at most 300 s. "
        "megarl has not found its process on its machine: Ray has not started it"
    )
    assert second.startswith("megarl has waited 121 s for the start of service engine0 on machine (pid 7), and")
    assert second.endswith("Its process runs, in state S; its output: /tmp/ray/worker-7.err.")


@pytest.fixture
def stop_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Callable[[], int]]:
    """Stop the first process that a cluster starts from now on, as soon as it exists. The result waits for its process id."""

    def begin() -> Callable[[], int]:
        marks, stopped = list[str](), list[int]()

        def note_mark() -> str:
            marks.append(new_mark())
            return marks[-1]

        def stop() -> None:
            deadline = time.monotonic() + 60
            while not stopped and time.monotonic() < deadline:
                for process in find_starting(marks[:1]).values():
                    os.kill(process.pid, signal.SIGSTOP)
                    stopped.append(process.pid)
                time.sleep(0.01)

        monkeypatch.setattr("megarl.cluster.ray.cluster.new_mark", note_mark)
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()

        def pid() -> int:
            thread.join()
            return stopped[0]

        return pid

    return begin


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


@pytest.mark.slow
@pytest.mark.parametrize("essential", [True, False])
def test_an_engine_stopped_in_its_first_second_is_named(connect, monkeypatch, stop_first, essential: bool) -> None:  # type: ignore[no-untyped-def]
    """It was noticed only after the 300 s that Ray has to start a process."""
    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.2)
    cluster, first = connect(0, 1, shared=False), stop_first()
    options: dict[str, Any] = {"devices": 1, "env": ENGINE_ENV, "essential": essential}
    engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="engine0", **options)
    pid = first()
    began = time.monotonic()
    named = (
        rf"service engine0 on {host_name()} \(pid {pid}\) (failed|died): its process has been stopped for 2 s before"
    )
    if essential:
        with pytest.raises(ServiceDied, match=named):
            check_for(cluster, 20)
        assert eventually(lambda: not Path(f"/proc/{pid}").exists()), "it ends with the run"
    else:
        assert eventually(lambda: cluster.check() or engine.failure() is not None, 20)
        with pytest.raises(ServiceDied, match=named):
            engine.call("scaled", 1).result(timeout=10)
        new = cluster.start_service(
            "tests.support.cluster_workers:Engine", (5,), name="engine0", replaces=engine, **options
        )
        assert not Path(f"/proc/{pid}").exists()
        assert new.call("scaled", 1).result(timeout=60) == 5
    assert time.monotonic() - began < 60


def check_for(cluster: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        cluster.check()
        time.sleep(0.05)


def test_an_engine_killed_before_it_has_reported_its_place_is_named(connect, monkeypatch, stop_first) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.2)
    cluster, first = connect(0, 1, shared=False), stop_first()
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    pid = first()
    assert eventually(lambda: cluster.check() or engine.known_place.pid == pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        ServiceDied, match=rf"service engine0 on {host_name()} \(pid {pid}\) died: its process ended before"
    ):
        check_for(cluster, 20)


def test_a_trainer_stopped_in_its_first_second_is_named(connect, monkeypatch, stop_first) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.2)
    cluster, first = connect(2), stop_first()
    with pytest.raises(
        WorkerFailed, match=r"trainer rank [01] on .* \(pid \d+\) failed: its process has been stopped"
    ) as caught:
        cluster.start_trainers("tests.support.cluster_workers:Echo", 2, ())
    assert caught.value.failure.place.pid == first()
    assert eventually(lambda: not Path(f"/proc/{first()}").exists())
