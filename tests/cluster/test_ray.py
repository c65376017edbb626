"""Trainers and engines over Ray: calls, failures and ends of their processes."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from megarl.cluster import CallFailed, ServiceDied, WorkerFailed, host_name
from megarl.cluster.stacks.report import lines_of
from tests.support.cluster_workers import ROOT, alive, descendants, wait_until
from tests.support.ray_services import ENGINE_ENV, THREADS, free_npus

pytestmark = pytest.mark.stack


def test_calls_scatters_and_collectives(connect, tmp_path):
    group = connect(2).start_trainers("tests.support.cluster_workers:Reducer", 2, ())
    first, second = group.call("identify")
    assert (first[0], first[2:], second[0], second[2:]) == (0, ("0", "2", "trainer"), 1, ("1", "2", "trainer"))
    assert group.call("sum", 2) == [4.0, 4.0]
    assert group.scatter("echo", [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    shared = ("both",)
    assert group.scatter("echo", [shared, shared]) == [(0, "both"), (1, "both")]
    nothing, (word, (refs,)) = group.scatter_with_data("give", [None, ([[5]],)], parts=1)
    assert nothing is None and word == "from 1" and group.call("total", [refs]) == [5.0, 5.0]
    assert "trainer rank 1" in (tmp_path / "trainer-1.log").read_text()
    group.shutdown()
    assert wait_until(lambda: not alive(first[1]) and not alive(second[1]), 5)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "die_in_collective",
            r"trainer rank 1 on .* \(pid \d+\) died: its process ended without a message(.|\n)*the last words",
        ),
        pytest.param(
            "raise_in_collective",
            r"trainer rank 1 on .* \(pid \d+\) failed: ValueError: this rank has had enough",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_cause_is_raised_within_seconds(connect, method, message):
    cluster = connect(2, 1)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    pids = [*engine.call("child_pid").result(timeout=60)]
    group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, ())
    pids += [place[1] for place in group.call("identify")]
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=message) as caught:
        group.call(method, 1)
    assert time.monotonic() - began < 8
    assert ("had enough" in caught.value.failure.traceback) == (method == "raise_in_collective")
    assert wait_until(lambda: not any(map(alive, pids)), 5)  # an engine's own child too


@pytest.mark.slow
def test_a_stopped_trainer_is_named(connect, monkeypatch):
    """A stopped trainer keeps its connections open; a collective of the others times out after half an hour."""
    from megarl.cluster import sigstop_watch
    from megarl.cluster.ray import watch

    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.3)
    group = connect(2).start_trainers("tests.support.cluster_workers:Reducer", 2, ())
    monkeypatch.setattr(watch.ray, "remote", None)  # a new remote function per look would accumulate in the cluster
    pids = [place[1] for place in group.call("identify")]
    began = time.monotonic()
    message = (
        rf"trainer rank 1 on .* \(pid {pids[1]}\) failed: its process has been stopped for 3 s in stop_in_collective"
    )
    with pytest.raises(WorkerFailed, match=message):
        group.call("stop_in_collective", 1)
    assert time.monotonic() - began < 15
    assert wait_until(lambda: not any(map(alive, pids)), 5)


@pytest.mark.slow
def test_a_trainer_that_does_not_enter_a_collective_is_named(connect, tmp_path):
    cluster = connect(2, 1, stall=3.0)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, ())
    pids = [place[1] for place in group.call("identify")]
    engine.call("scaled", 1).result(timeout=60)
    trainers, services = cluster.stacks()
    assert (
        trainers.call == ""
        and lines_of(trainers) == []
        and [place.name for place in services.places] == ["service engine0"]
    )
    assert [state["problem"] for state in (*trainers.stacks, *services.stacks)] == ["", "", ""]
    with pytest.raises(WorkerFailed) as caught:
        group.call("sleep_in_collective", 1)
    lines = str(caught.value).splitlines()
    assert re.match(
        rf"trainer rank 1 on .* \(pid {pids[1]}\) failed: others wait for it in sleep_in_collective", lines[0]
    )
    assert lines[2] == "  rank 0: all_reduce in the group of all trainers (ranks 0-1)"
    missing = lines[lines.index("others wait for:") + 1 :]
    assert missing[0].endswith(": 1 collective behind in the group of all trainers")
    assert re.fullmatch(r"    .*cluster_workers.py:\d+ sleep_in_collective", missing[1])
    assert missing[2:4] == [f"    its output, {tmp_path}/trainer-1.log, ends:", "      the last words"]
    assert wait_until(lambda: not any(map(alive, pids)), 5)


@pytest.mark.slow
def test_a_long_call_that_makes_progress_is_not_ended(connect):
    group = connect(2, stall=2.0).start_trainers("tests.support.cluster_workers:Reducer", 2, ())
    assert group.call("sum_slowly", 1, 8.0) == [2.0, 2.0]


def test_an_error_in_a_constructor_is_raised(connect):
    with pytest.raises(WorkerFailed, match="TypeError"):
        connect(1).start_trainers("tests.support.cluster_workers:Engine", 1, ())
    engine = connect(0, 1, shared=False).start_service(
        "tests.support.cluster_workers:Engine", (-1,), name="engine0", devices=1, env=ENGINE_ENV
    )
    with pytest.raises(ServiceDied, match="ValueError: scale is negative"):
        engine.call("scaled", 1).result(timeout=60)


def test_a_service_runs_many_calls_concurrently(connect, one_ray, tmp_path):
    cluster = connect(1, 1)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    futures = [engine.call("slow", i) for i in range(300)]
    assert [future.result(timeout=60) for future in futures] == list(range(300))
    assert engine.call("concurrency").result() > 100
    assert engine.host == host_name()
    assert engine.call("variable", "ROLE").result() == "engine"
    with pytest.raises(CallFailed, match=r"service engine0 on .* failed: KeyError: 'no such prompt'"):
        engine.call("fail").result()
    assert engine.alive()

    # The vectors are in Ray's store; a trainer fetches them by their reference.
    control, data = engine.call_with_data("generate", 4).result()
    assert control == {"lengths": [4, 4]}
    assert isinstance(data.ref, one_ray.ObjectRef)
    assert data.get()[1].tokens.tolist() == [1, 2, 3, 4]
    group = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
    assert group.call("fetch", data, 1) == [[1, 2, 3, 4]]
    with pytest.raises(CallFailed, match="KeyError"):
        engine.call_with_data("fail").result()

    # Parts have separate references; places without a part have none.
    control, data = engine.call_with_parts("several", 4).result()
    assert control == [2, 2, 2] and len({each.ref for each in data}) == 3
    assert [[len(sample.tokens) for sample in each.get()] for each in data] == [[1, 1], [2, 2], [3, 3]]
    assert group.call("fetch", data[2], 1) == [[1, 2, 3]]
    with pytest.raises(CallFailed, match="no 2 parts"):
        engine.call_with_parts("fail_parts", 2).result()

    _, child = engine.call("child_pid").result()
    engine.stop()
    assert "closed in order" in (tmp_path / "engine0.log").read_text()
    assert wait_until(lambda: not alive(child), 5)


def test_a_killed_service_ends_the_trainers_call(connect):
    cluster = connect(1, 1)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    group = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
    finished = [engine.call("slow", i) for i in range(3)]
    wait(finished, timeout=60)
    engine.call("die_later", 0.3).result(timeout=60)
    began = time.monotonic()
    with pytest.raises(ServiceDied, match=r"service engine0 .* died: .*(.|\n)*the engine's last words"):
        group.call("sleep", 100)
    assert time.monotonic() - began < 8
    assert [future.result() for future in finished] == [0, 1, 2]  # the death takes no result back
    with pytest.raises(ServiceDied):
        engine.call("scaled", 1).result(timeout=10)


def test_a_service_that_is_not_essential_may_die_and_be_replaced(connect, monkeypatch):
    """The new process takes the devices of the old one. A stopped process is killed."""
    from megarl.cluster import sigstop_watch

    assert wait_until(lambda: free_npus() == 4, 10)
    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.1)
    cluster = connect(1, 2, npus=True, shared=False)
    options = {"devices": 1, "env": ENGINE_ENV, "essential": False}
    dying, other = (
        cluster.start_service("tests.support.cluster_workers:Engine", (3,), name=f"engine{i}", **options)
        for i in (0, 1)
    )
    device = dying.call("variable", "ASCEND_RT_VISIBLE_DEVICES").result(timeout=60)
    other.call("scaled", 1).result(timeout=60)
    seen = []
    cluster.on_check(lambda: seen.append(dying.failure()))
    os.kill(dying.place().pid, signal.SIGKILL)
    assert wait_until(lambda: cluster.check() or seen[-1] is not None, 10)
    assert seen[-1].died and seen[-1].place.name == "service engine0"
    new = cluster.start_service("tests.support.cluster_workers:Engine", (5,), name="engine0", replaces=dying, **options)
    assert new.call("variable", "ASCEND_RT_VISIBLE_DEVICES").result(timeout=60) == device
    assert new.call("scaled", 1).result(timeout=10) == 5 and other.alive()

    os.kill(other.place().pid, signal.SIGSTOP)
    assert wait_until(lambda: cluster.check() or other.failure() is not None, 20)
    assert other.failure().died and "its process has been stopped" in other.failure().cause
    with pytest.raises(ServiceDied, match="has been stopped"):
        other.call("scaled", 1).result(timeout=10)
    assert new.call("scaled", 2).result(timeout=10) == 10


@pytest.mark.slow
def test_an_idle_trainer_that_dies_is_named(connect):
    cluster = connect(2, 1)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    group = cluster.start_trainers("tests.support.cluster_workers:Echo", 2, ())
    engine.call("scaled", 1).result(timeout=60)
    began = time.monotonic()
    for _ in range(10):
        cluster.check()
    assert time.monotonic() - began < 1
    pids = [identity[1] for identity in group.call("identify")]
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=rf"trainer rank 1 on .* \(pid {pids[1]}\) died: its process ended"):
        while True:
            cluster.check()
            time.sleep(1)
    assert time.monotonic() - began < 3
    assert wait_until(lambda: not any(map(alive, pids)), 5)


@pytest.mark.slow
def test_a_service_stopped_by_a_signal_is_named(connect, monkeypatch):
    """It keeps its connection open, and the run would wait for `rollout.timeout`, an hour."""
    from megarl.cluster import sigstop_watch

    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.2)
    cluster = connect(0, 1, shared=False)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    engine.call("scaled", 1).result(timeout=60)
    cluster.check()
    os.kill(engine.place().pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ServiceDied, match=r"service engine0 on .* failed: its process has been stopped for 2 s"):
        while time.monotonic() < began + 10:
            cluster.check()
            time.sleep(0.1)
    assert wait_until(lambda: not alive(engine.place().pid), 10)


def test_a_dead_service_is_named_and_a_service_that_was_ended_is_not(connect):
    cluster = connect(0, 2, shared=False)
    first, second = (
        cluster.start_service(
            "tests.support.cluster_workers:Engine", (3,), name=f"engine{i}", devices=1, env=ENGINE_ENV
        )
        for i in range(2)
    )
    second.call("scaled", 1).result(timeout=60)
    first.stop()
    cluster.check()
    second.call("die_later", 0.0)
    began = time.monotonic()
    with pytest.raises(ServiceDied, match=r"service engine1 on .* died"):
        while time.monotonic() < began + 3:
            cluster.check()
            time.sleep(0.2)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_all_processes_end_with_the_controller(tmp_path, how):
    """Ray's autoscaler, log monitor and dashboard server are not started: they would delay each start."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | THREADS
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.support.cluster_workers", "ray", str(tmp_path)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    fact = next(line for line in controller.stdout if line.startswith("FACT pids"))
    pids = [int(pid) for pid in fact.split()[2:]] + descendants(controller.pid)
    assert all(map(alive, pids)) and len(pids) > 5  # Ray's own processes among them
    commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids)
    assert "raylet" in commands and not re.search(r"\b(log_)?monitor\.py|dashboard\.py", commands)
    controller.send_signal(how)
    assert wait_until(lambda: not any(map(alive, pids)) and controller.poll() is not None, 10)


@pytest.mark.slow
def test_trainers_that_are_not_essential_start_again_beside_other_processes(connect):
    """After an error in a call, and after the death of an idle rank, which `check` finds without an exception."""
    cluster = connect(2, 1)
    engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="e0", devices=1, env=ENGINE_ENV)
    group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, (), essential=False)
    first = [pid for _, pid, *_ in group.call("identify")]
    with pytest.raises(WorkerFailed, match="no luck"):
        group.call("raise_on", 1, "no luck")
    cluster.end_trainers()
    assert not any(map(alive, first)), "their devices must be free before others start"
    group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, (), essential=False)
    second = [pid for _, pid, *_ in group.call("identify")]
    os.kill(second[1], signal.SIGKILL)

    def found():
        cluster.check()
        return group.failure is not None

    assert wait_until(found, 30)
    assert "trainer rank 1" in str(group.failure) and "SIGKILL" in str(group.failure)
    cluster.end_trainers()
    group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, (), essential=False)
    assert [rank for rank, *_ in group.call("identify")] == [0, 1] and group.failure is None
    assert engine.call("scaled", 2).result(30) == 6
