"""A stopped service has ended when `stop` returns, so that others can take its device memory."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.ray import env as ray_env

ray_env.prepare(private=True)

from megarl.cluster.ray import service as ray_service  # noqa: E402 -- after the variables that Ray reads at import


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
    service = ray_service.RayService(Actor(), ProcessInfo("engine0", pid=process.pid), "engine0", [device], "a:B", ())
    service.stop()
    assert not Path(f"/proc/{process.pid}").exists(), "Ray reports the end of a process before the system does"
    assert calls == [("stop", ray_service.STOP_SECONDS), "kill", ("lifetime", ray_service.KILL_SECONDS)]
