"""The faults of `benchmarks.deaths`: their schedule, and each kind on a process or a file system."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from itertools import islice

import psutil
import pytest

from benchmarks.deaths import PROCESSES
from benchmarks.fault_schedule import KINDS, MOMENTS, Fault, schedule
from benchmarks.injection import close_connections, hang, trace


def draw(seed: int, count: int) -> list[Fault]:
    return list(islice(schedule(random.Random(seed), list(KINDS), MOMENTS, PROCESSES["all"]), count))


def test_a_seed_repeats_its_schedule_which_has_each_kind_and_moment() -> None:
    faults = draw(3, 100)
    assert faults == draw(3, 100) != draw(4, 100)
    kinds, moments = (Counter(getattr(fault, name) for fault in faults) for name in ("kind", "moment"))
    assert set(kinds) == set(KINDS) and set(moments) == set(MOMENTS) and min(*kinds.values(), *moments.values()) >= 5
    assert {victim for fault in faults for victim in fault.victims} == set(PROCESSES["all"])


def test_faults_that_cannot_be_mended_are_not_drawn() -> None:
    for fault in draw(5, 500):
        assert bool(fault.victims) != (fault.kind in ("disk", "shm"))
        assert "controller" not in fault.victims or fault.kind == "kill", "nothing replaces a controller that hangs"
        assert (fault.kind, fault.moment) != ("hang", "start"), "only rollout.start_timeout ends such a start"


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace and pidfd_getfd are calls of Linux")
def test_a_hung_process_runs_nothing_and_is_not_called_stopped() -> None:
    command = "import time\nwhile True: print('.', flush=True), time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        tracer = hang(process.pid)
        deadline = time.monotonic() + 30
        while psutil.Process(process.pid).status() != psutil.STATUS_TRACING_STOP:
            assert time.monotonic() < deadline and tracer.poll() is None
            time.sleep(0.01)
        process.kill()
        assert tracer.wait(30) == 0, "the tracer reaps its threads, so that the parent notices the end"
        assert process.wait(30) == -9
    with pytest.raises(OSError):
        trace(process.pid)


def test_closed_connections_end_at_both_sides_and_listeners_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert close_connections(os.getpid()) >= 2
            assert client.recv(1) == accepted.recv(1) == b""
        with socket.create_connection(server.getsockname()) as again:
            assert again.getpeername() == server.getsockname()
