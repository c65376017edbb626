"""The watch detects a stopped process, but not a busy one or a short stop."""

import signal
import subprocess
import sys
import time

import pytest

from megarl.cluster import sigstop_watch
from megarl.cluster.failures import ProcessInfo, WorkerFailed
from megarl.cluster.sigstop_watch import LOOKS, LocalWatch, StopDetector, stopped_pids
from tests.support.cluster_workers import wait_until

PLACES = [ProcessInfo("trainer rank 0", "node7", 100), ProcessInfo("trainer rank 1", "node7", 101)]


@pytest.fixture
def busy():
    """A process with blocked threads: native code holds the GIL."""
    process = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.PyDLL(None).sleep(1000)"])
    yield process
    process.kill()
    process.wait()


def test_stopped_pids_lists_only_stopped_processes(busy):
    assert stopped_pids([busy.pid, 1 << 30]) == []
    busy.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: stopped_pids([1 << 30, busy.pid]) == [busy.pid], 5)
    busy.send_signal(signal.SIGCONT)
    assert wait_until(lambda: stopped_pids([busy.pid]) == [], 5)


def test_only_consecutive_looks_count():
    detector = StopDetector(PLACES, "update_actor")
    for _ in range(3):  # a pause that ended, again and again
        for _ in range(LOOKS - 1):
            detector.record([0, 1], [101])
        detector.record([0, 1], [])
    for _ in range(LOOKS - 1):
        detector.record([0, 1], [101])
    detector.record([0], [])  # a look at another machine has no effect on this rank
    message = r"trainer rank 1 on node7 \(pid 101\) failed: its process has been stopped for 20 s in update_actor"
    with pytest.raises(WorkerFailed, match=message) as caught:
        detector.record([1], [101])
    assert not caught.value.failure.is_communication, "a cause, not the consequence of another failure"


def test_counts_go_on_when_the_watched_processes_change():
    """Two are stopped together. When the first has been replaced, the second is named at the next look, not after another 20 s."""
    detector = StopDetector(PLACES, "the run")
    for _ in range(LOOKS - 1):
        detector.record([0, 1], [100, 101])
    with pytest.raises(WorkerFailed, match="rank 0"):
        detector.record([0, 1], [100, 101])
    after = StopDetector([PLACES[1], ProcessInfo("trainer rank 0", "node7", 102)], "the run")
    after.continue_from(detector)
    with pytest.raises(WorkerFailed, match="rank 1"):
        after.record([0, 1], [101])


def test_a_pause_of_the_controller_counts_as_one_look(busy, monkeypatch):
    """A controller that was stopped together with the others finds that its clock has moved on."""
    busy.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: stopped_pids([busy.pid]) == [busy.pid], 5)
    watch = LocalWatch([ProcessInfo("trainer rank 0", pid=busy.pid)], "update_actor")
    leap = [0.0]
    now = time.monotonic
    monkeypatch.setattr(sigstop_watch.time, "monotonic", lambda: now() + leap[0])
    for _ in range(LOOKS - 1):
        leap[0] += 1000
        watch.check()
        watch.check()  # not due
    leap[0] += 1000
    with pytest.raises(WorkerFailed):
        watch.check()
