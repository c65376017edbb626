"""A peer that dies or stops in a sharded update is named by all other ranks within seconds; no rank waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import Failure, ProcessInfo, Raised
from megarl.weight_sync import heartbeat
from megarl.weight_sync.incoming import IncomingBuckets
from megarl.weight_sync.session import Session
from tests.support.sharded_ranks import SHAPES, ShardedCluster, open_cluster, open_session

HERE, APART = ["here"] * 4, ["b", "b", "c", "c"]
TIMEOUT = 60.0  # no rank may wait this long
SECONDS = 5.0  # until every rank has detected a death
LARGE = {"odd": (2048, 1024)}  # 8 MB: a transfer that takes its time


class Split:
    """A weight sync split over two processes: `trainers` and `engines` in a child process, all other ranks here."""

    def __init__(self, shm_dir: Any, places: list[str], trainers: list[int], engines: list[int], **fault: Any) -> None:
        shapes, inside = (
            fault.pop("shapes", {}),
            fault.pop("inside", []),
        )  # a command that the process is started through
        here = [[rank for rank in range(4) if rank not in remote] for remote in (trainers, engines)]
        options = {
            "timeout": TIMEOUT,
            "heartbeat_timeout": fault.pop("heartbeat_timeout", 8.0),
            "host": fault.pop("host", "127.0.0.1"),
        }
        session, store = (
            open_session(shm_dir, places, bucket_bytes=1 << 21, **options) if 0 in here[0] else (None, None)
        )
        case = {
            "trainers": trainers, "engines": engines, "shapes": shapes, "shm_dir": str(shm_dir), "places": places,
            "session": session and json.loads(session.to_json()), "options": options,
            "place": None, "signal": signal.SIGKILL, "before": False, **fault,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.support.sharded_member", json.dumps(case)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        line = self.read() if session is None else ""
        self.here = ShardedCluster(session or Session.from_json(line), store, *here)
        self.here.connect()
        if session is not None:
            self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line

    def start(self, version: int) -> list[Any]:
        """Start an update in both processes; returns the futures of this process's ranks."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        sending, receiving = self.here.start(version)
        return [*sending, *receiving]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.here.close()


@contextlib.contextmanager
def split(*arguments: Any, **fault: Any) -> Iterator[Split]:
    run = Split(*arguments, **fault)
    try:
        assert all(future.result(30) for future in run.start(1)) and run.read() == "done\n"
        yield run
    finally:
        run.close()


def struck(run: Split, seconds: float) -> list[str]:
    """Run an update that the child process does not survive; returns the error of each rank here.

    The update and the cleanup must end within `seconds`.
    """
    in_flight = run.start(2)
    start = time.monotonic()
    errors = [str(rank.exception(TIMEOUT / 2)) for rank in in_flight]
    run.here.close()
    assert time.monotonic() - start < seconds
    return errors


def consequence(error: str) -> bool:
    """Return whether the controller classifies the error as a consequence of another process's death."""
    return Failure.raised(ProcessInfo("trainer rank 1"), Raised("WeightSyncError", error, "")).is_communication


@pytest.mark.parametrize(
    ("peer", "places", "place", "before"),
    [
        pytest.param("trainer", HERE, "outgoing.OutgoingBuckets.send", False, marks=pytest.mark.slow),
        ("engine", APART, "process_group.BroadcastGroup.start", False),
        pytest.param("trainer", APART, "process_group.BroadcastGroup.start", True, marks=pytest.mark.slow),
        pytest.param("trainer", APART, "process_group.BroadcastGroup.start", False, marks=pytest.mark.slow),
        pytest.param("engine", APART, "process_group.BroadcastGroup.start", True, marks=pytest.mark.slow),
        pytest.param("engine", HERE, "sharded.receiver.ShardedReceiver._load", True, marks=pytest.mark.slow),
    ],
)
def test_a_death_ends_the_update_on_all_ranks(tmp_path, monkeypatch, peer, places, place, before):
    """`before`: the other ranks have been notified of a transfer that never begins."""
    monkeypatch.setitem(SHAPES, "odd", LARGE["odd"])
    ranks = ([3], []) if peer == "trainer" else ([], [3])
    with split(tmp_path, places, *ranks, place=place, before=before, shapes=LARGE) as run:
        errors = struck(run, SECONDS)
    name = "trainer 3" if peer == "trainer" else "engine rank e1/1"
    pattern = (
        rf"aborted: {name} \(process {run.process.pid} on .*\) died in the update to version 2: connection closed by"
    )
    waited = rf"{pattern}.* \(this process waited for .*(trainer 3|e1/1)"
    assert any(re.search(waited, error) for error in errors), errors
    failed = [error for error in errors if error != "None"]  # other ranks may have finished without the dead rank
    assert all(consequence(error) and re.search(pattern, error) for error in failed), errors


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "(its process is gone|the process of trainer 0 has ended)"),
        pytest.param(signal.SIGSTOP, "trainer 0 sent no heartbeat for 2 s", marks=pytest.mark.slow),
    ],
)
def test_the_death_of_trainer_0_is_detected_by_all_ranks(tmp_path, number, words):
    """A stopped store answers nothing, and torch's client would wait for it forever."""
    all_but_one = [0, 1, 2, 3], [0, 1, 2]  # the store's process must not share a connection with ranks here
    fault = {
        "place": "outgoing.OutgoingBuckets.send",
        "before": True,
        "signal": number,
        "heartbeat_timeout": 2.0,
    }
    with split(tmp_path, HERE, *all_but_one, **fault) as run:
        (error,) = struck(run, SECONDS + 3)
    pattern = rf"trainer 0\) broke \(Dist.*\): {words}.* \(this process waited for e1/1: a bucket from trainers"
    assert re.search(pattern, error) and consequence(error), error


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [([3], []), ([], [3])])
def test_a_stopped_process_is_named_after_missed_heartbeats(tmp_path, ranks):
    fault = {
        "place": "process_group.BroadcastGroup.start",
        "before": True,
        "signal": signal.SIGSTOP,
        "heartbeat_timeout": 2.0,
    }
    with split(tmp_path, APART, *ranks, **fault) as run:
        errors = struck(run, SECONDS + 3)
    pattern = rf"\(process {run.process.pid} on .*\) sent no heartbeat for 2 s in the update to version 2: it is"
    failed = [error for error in errors if error != "None"]
    assert failed and all(re.search(pattern, error) for error in failed), errors


@pytest.mark.slow
def test_a_process_stopped_between_updates_is_not_dropped(tmp_path):
    with split(tmp_path, HERE, [], [2, 3], heartbeat_timeout=2.0) as run:
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        run.process.send_signal(signal.SIGCONT)
        assert all(rank.result(20) for rank in run.start(2)) and run.read() == "done\n"


def test_a_pause_of_the_monitor_is_not_a_missed_heartbeat(tmp_path, monkeypatch):
    """A pause of all processes is not a missed heartbeat: trainer 0's clock jumps before any peer can send one."""
    leap = [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0]))
    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        cluster.update(1)
        in_flight = [cluster.pool.submit(sender.send, 2, cluster.export) for sender in cluster.senders]
        in_flight += [cluster.pool.submit(cluster.receive, rank, 2) for rank in (0, 1, 2)]
        time.sleep(1.5)
        leap[0] = 100.0
        time.sleep(1.5)
        in_flight.append(cluster.pool.submit(cluster.receive, 3, 2))
        assert all(rank.result(10) for rank in in_flight)


def test_unknown_connections_at_the_heartbeat_port_are_ignored(tmp_path):
    """The port is open to the network: invalid JSON, deep nesting, long lines, a wrong session and silence are ignored."""
    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        monitor = cluster.senders[0]._monitor
        assert monitor is not None
        where = monitor._listener.getsockname()[:2]
        payloads = [
            b"no json\n",
            b"[" * 4000 + b"\n",
            b"x" * 10000,
            b'["another", "trainer 1"]\n',
            b"7\n",
            b"null\n",
            b"",
        ]
        strangers = [socket.create_connection(where) for _ in payloads]
        for stranger, words in zip(strangers, payloads, strict=True):
            stranger.sendall(words)
        cluster.update(1)
        for stranger in strangers[:3]:
            stranger.close()
        cluster.update(2)
        assert any(thread.name == "megarl-heartbeat-monitor" for thread in threading.enumerate())
        for stranger in strangers:
            stranger.close()


def test_a_failed_process_ends_without_waiting_for_its_transfers(tmp_path, monkeypatch):
    """gloo would wait until its timeout. The refused bucket comes from the child process, so that is in its update."""
    start_transfer = IncomingBuckets._start

    def full(self: IncomingBuckets, header: dict[str, Any]) -> Any:
        if header["holder"] == ["trainer", 3]:
            raise MemoryError("no room")
        return start_transfer(self, header)

    with split(tmp_path, APART, [3], []) as run:
        monkeypatch.setattr(IncomingBuckets, "_start", full)
        in_flight = run.start(2)
        start = time.monotonic()
        stderr = run.process.communicate()[1]
        assert time.monotonic() - start < SECONDS
        assert run.process.returncode == 1 and "MemoryError: no room (this process waited for bucket" in stderr, stderr
        assert all(rank.exception(SECONDS) for rank in in_flight)
