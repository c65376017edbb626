"""Failures are reported once, with the first cause."""

import os
import time

import pytest

from megarl.cluster import failures
from megarl.cluster.base import load_class
from megarl.cluster.failures import Failure, ProcessInfo, Raised, Returned, WorkerFailed, collect, exit_cause, log_tail

BROKEN = Raised("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711", "")
TIMED_OUT = Raised("DistBackendError", "NCCL communicator was aborted on rank 0", "")
OWN = Raised("ValueError", "the loss is nan", "Traceback ...")


def place(rank):
    return ProcessInfo(f"trainer rank {rank}", "node7", 100 + rank)


def replay(events, size):
    """`collect` over answers that come at given seconds."""
    began = time.monotonic()

    def poll(pending, seconds):
        time.sleep(0.01)
        now = time.monotonic() - began
        return [(rank, outcome) for at, rank, outcome in events if at <= now and rank in pending]

    return collect(size, poll, lambda: None)


def test_results_are_in_rank_order_for_any_order_of_arrival():
    events = [(0.05, 0, Returned("a")), (0.0, 1, Returned("b")), (0.02, 2, Returned("c"))]
    assert replay(events, 3) == ["a", "b", "c"]


@pytest.mark.parametrize("consequence", [BROKEN, TIMED_OUT])
def test_the_cause_is_raised_even_if_its_consequence_arrives_first(consequence):
    events = [(0.0, 0, Failure.raised(place(0), consequence)), (0.5, 1, Failure.raised(place(1), OWN))]
    with pytest.raises(
        WorkerFailed, match=r"trainer rank 1 on node7 \(pid 101\) failed: ValueError: the loss is nan"
    ) as e:
        replay(events, 3)  # rank 2 never answers
    assert e.value.failure.traceback == "Traceback ..."


def test_a_death_takes_precedence_over_a_broken_connection():
    death = Failure.death(place(1), "its process was killed by signal 9 (SIGKILL)")
    events = [(0.0, 0, Failure.raised(place(0), BROKEN)), (0.3, 1, death)]
    with pytest.raises(WorkerFailed, match=r"trainer rank 1 .* died: .*SIGKILL"):
        replay(events, 2)


def test_a_broken_connection_is_raised_if_no_other_cause_arrives(monkeypatch):
    monkeypatch.setattr(failures, "COMMUNICATION_GRACE", 0.1)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"trainer rank 0 .* Connection closed by peer"):
        replay([(0.0, 0, Failure.raised(place(0), BROKEN))], 2)
    assert time.monotonic() - began < 2


def test_ranks_with_the_same_failure_are_counted():
    with pytest.raises(WorkerFailed, match="2 other ranks failed alike"):
        replay([(0.0, rank, Failure.raised(place(rank), OWN)) for rank in range(3)], 3)


def test_an_error_of_the_check_is_raised_while_waiting():
    def check():
        raise KeyError("engine")

    with pytest.raises(KeyError):
        collect(1, lambda *_: [], check)


@pytest.mark.parametrize(
    ("code", "message"), [(3, "exited with code 3"), (-9, r"signal 9 \(SIGKILL\).*memory"), (-11, "SIGSEGV")]
)
def test_exit_cause(code, message):
    import re

    assert re.search(message, exit_cause(code))


def test_log_tail_is_of_the_newest_process(tmp_path):
    log = tmp_path / "trainer-0.log"
    header = f"{failures.HEADER} trainer rank 0, pid 1 ===\n"
    log.write_text(header + "of the run before\n" + header + "new line 1\nnew line 2\n")
    assert log_tail(str(log)) == "  new line 1\n  new line 2"
    assert log_tail(str(log), lines=1) == "  new line 2"
    assert log_tail(str(tmp_path / "on another machine")) == ""


def test_a_process_without_an_id_has_not_written_the_last_lines_of_its_log(tmp_path):
    """It died before it had reported its place: the file has the output of the process before it."""
    log = tmp_path / "engine0.log"
    log.write_text("=== megarl: service engine0, pid 7 ===\nthe end of an earlier process\n")
    known, unknown = (Failure.death(ProcessInfo("service engine0", "host", pid, str(log)), "killed") for pid in (7, 0))
    assert str(known).endswith("which ends:\n  the end of an earlier process")
    assert str(unknown) == f"service engine0 on host died: killed\nIts output: {log}"


def test_log_tail_leaves_out_the_statistics_of_ray(tmp_path):
    log = tmp_path / "raylet.out"
    log.write_text("agent exited\n" + "[state-dump] NodeManager.Task - 1 total (0 active)\n" * 2000)
    assert log_tail(str(log)) == "", "the last words are further back than the bytes that are read"
    log.write_text("agent exited\n" + "[state-dump] NodeManager.Task - 1 total (0 active)\n" * 100)
    assert log_tail(str(log)) == "  agent exited"


def test_load_class_refuses_an_invalid_name():
    assert load_class("os:stat_result") is os.stat_result
    for name, message in [
        ("os.stat_result", "package.module:Class"),
        ("os:nothing", "no class nothing"),
        ("os:getpid", "no class"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_class(name)
