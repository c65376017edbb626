"""A stopped service has ended when `stop` returns, so that others can take its device memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import ProcessInfo, ServiceDied
from megarl.cluster.ray import env as ray_env

ray_env.prepare(private=True)

from megarl.cluster.ray import service as ray_service  # noqa: E402 -- after the variables that Ray reads at import
from megarl.cluster.ray.failures import death_cause, located, not_started  # noqa: E402
from megarl.cluster.ray.stored_data import StoredData  # noqa: E402


class Actor:
    """A stand-in; a call returns the method's name as its reference."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: method)


def test_stop_waits_for_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def wait(refs: list[Any], *, timeout: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        if timeout:
            calls.append((*refs, timeout))
        return [], refs

    monkeypatch.setattr(ray_service, "ray_wait", wait)
    monkeypatch.setattr(ray_service.ray, "kill", lambda actor: calls.append("kill"))
    process = subprocess.Popen(["sleep", "100"])
    threading.Timer(0.3, lambda: (process.kill(), process.wait())).start()
    device: Any = SimpleNamespace(node_ip="127.0.0.1", node_id="node")
    service = ray_service.RayService(
        Actor(), ProcessInfo("engine0", pid=process.pid), "engine0", [device], "a:B", (), StoredData()
    )
    service.stop()
    assert not Path(f"/proc/{process.pid}").exists(), "Ray reports the end of a process before the system does"
    assert calls == [("stop", ray_service.STOP_SECONDS), "kill", ("lifetime", ray_service.KILL_SECONDS)]


def test_a_call_fails_if_ray_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an exception, the caller would wait for ever."""

    def broken(*args: Any, **options: Any) -> Any:
        raise ray_service.ray.exceptions.RaySystemError(RuntimeError("the control store is gone"))

    monkeypatch.setattr(ray_service, "ray_wait", broken)
    device: Any = SimpleNamespace(node_ip="127.0.0.1", node_id="node")
    service = ray_service.RayService(
        Actor(), ProcessInfo("engine0", pid=1), "engine0", [device], "a:B", (), StoredData()
    )
    done: Future[Any] = Future()
    result = service._chain(SimpleNamespace(future=lambda: done), lambda value: value)
    done.set_exception(ray_service.RayActorError())
    with pytest.raises(ServiceDied, match="the control store is gone"):
        result.result(timeout=10)


def test_a_process_that_ray_cannot_reach_is_not_called_killed() -> None:
    error = ray_service.ray.exceptions.ActorUnavailableError("the node does not answer", None)
    assert "may still run" in death_cause(error)


def test_a_death_before_the_reply_has_the_process_id_of_rays_report() -> None:
    error = ray_service.ray.exceptions.ActorDiedError()
    error.error_msg = (
        "The actor died.\n\tclass_name: ServiceActor\n\tpid: 5120\n\tip: 10.0.0.1\nits worker process has died."
    )
    place = ProcessInfo("service engine0", "10.0.0.1", log="/logs/engine0.log")
    found = located(place, error)
    assert str(found) == "service engine0 on 10.0.0.1 (pid 5120)" and not found.log, "an earlier process's output"
    assert located(ProcessInfo("service engine0", "10.0.0.1", 7), error).pid == 7, "what the process has reported"
    assert located(place, ray_service.ray.exceptions.ActorDiedError()) == place


def test_a_process_that_runs_and_does_not_reply_is_not_called_unstarted() -> None:
    failure = not_started(ProcessInfo("service engine0", "host", 7, "/tmp/worker-7.err"), 300.0)
    assert "has not reported its start within 300 s" in failure.cause and "/tmp/worker-7.err" in failure.cause
    assert "Ray has not started its process" in not_started(ProcessInfo("service engine0", "10.0.0.1"), 300.0).cause


QUIT = """
import os, signal, sys, threading
from megarl.cluster.ray.actors import ServiceActor
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
arguments = ("collections:Counter", (), "engine0", sys.argv[1])
thread = threading.Thread(target=ServiceActor()._construct, args=arguments)  # Ray's, not the main one
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGQUIT)
"""


def test_sigquit_ends_an_actor_of_a_background_job(tmp_path: Path) -> None:
    """SGLang's processes report a failure with SIGQUIT, which shells ignore in background jobs of scripts."""
    process = subprocess.run([sys.executable, "-c", QUIT, str(tmp_path / "engine0.log")], check=False)
    assert process.returncode == -signal.SIGQUIT
