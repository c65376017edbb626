"""The end or stop of Ray's own processes is named at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster import ServiceDied, sigstop_watch
from megarl.cluster.ray import env as ray_env
from tests.support.cluster_workers import wait_until

ray_env.prepare(private=True)

from megarl.cluster.ray.processes import KeepersRayProcess, RayProcess, RayProcessWatch  # noqa: E402 -- after the variables that Ray reads at import


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RayProcess]]:
    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.2)
    started = []
    for name in ("raylet", "gcs_server"):
        log = tmp_path / f"{name}.out"
        log.write_text(f"first line\nlast words of {name}\n")
        started.append(RayProcess(name, subprocess.Popen(["sleep", "1000"]), str(log)))
    yield started
    for each in started:
        each.process.kill()
        each.process.wait()


def test_a_killed_process_is_named_with_its_last_words(
    two: list[RayProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    """The line on stderr appears even if Ray ends this process before the run reports the error."""
    watch = RayProcessWatch(two)
    watch.check()
    two[1].process.kill()
    began = time.monotonic()
    assert wait_until(lambda: watch.failure is not None, 5) and time.monotonic() - began < 2
    with pytest.raises(ServiceDied) as raised:
        watch.check()
    text = str(raised.value)
    assert "Ray's gcs_server on " in text and "killed by signal 9 (SIGKILL), as the kernel does" in text
    assert "All processes of the run end with it" in text, "a restart of the run goes on"
    assert "last words of gcs_server" in text and f"(pid {two[1].process.pid})" in text
    assert "Ray's gcs_server on " in capfd.readouterr().err
    watch.close()


def test_a_keeper_that_has_ended_is_named(two: list[RayProcess]) -> None:
    """The keeper's end ends Ray, which the controller sees first."""
    keeper, raylet = two[0].process, two[1].process
    process = KeepersRayProcess("raylet", raylet.pid, two[1].log, keeper.pid)
    assert process.end() is None
    raylet.kill()
    assert wait_until(lambda: process.end() is not None, 5) and process.end() == "its process has ended"
    keeper.kill()
    named = f"the process that keeps the workers (train.keep_workers, pid {keeper.pid}) has ended, and this process too"
    assert wait_until(lambda: process.end() == named, 5)


def test_a_call_without_a_connection_joins_no_other_cluster() -> None:
    """After Ctrl-C the thread of a failed call may ask Ray. By default Ray would connect to another run on this machine."""
    code = (
        "from megarl.cluster.ray import env\n"
        "env.prepare(private=True)\n"
        "import ray\n"
        "ray.init = lambda *_, **__: print('connects')\n"
        "try: ray.put(1)\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "connects" not in done.stdout and "has not been started" in done.stdout, done


def test_a_watch_of_no_process_has_no_thread() -> None:
    watch = RayProcessWatch([])
    assert "megarl-ray-processes" not in [thread.name for thread in threading.enumerate()]
    watch.check()
    watch.close()


def test_a_stopped_process_is_named_and_a_pause_is_not(two: list[RayProcess]) -> None:
    raylet, watch = two[0].process, RayProcessWatch(two)
    raylet.send_signal(signal.SIGSTOP)
    time.sleep(1)
    raylet.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    watch.check()
    raylet.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: watch.failure is not None, 10)
    with pytest.raises(ServiceDied, match=r"Ray's raylet on .* failed: its process has been stopped for 2 s"):
        watch.check()
    watch.close()


def test_a_watch_that_is_closed_reports_no_end(two: list[RayProcess]) -> None:
    watch = RayProcessWatch(two)
    watch.close()
    two[0].process.kill()
    time.sleep(0.5)
    watch.check()
