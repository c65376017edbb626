"""The processes of a private Ray cluster (raylet, GCS). Ray reports their end or stop late or not at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from megarl.cluster.failures import Failure, ProcessInfo, ServiceDied, exit_cause
from megarl.cluster.sigstop_watch import LOOK_SECONDS, LOOKS, stopped_pids

POLL_SECONDS = 0.2
_LOGS = {"raylet": "raylet.out", "gcs_server": "gcs_server.out"}


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that the watch reads."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray. `log`: its output file."""

    name: str
    process: ChildProcess
    log: str

    @property
    def place(self) -> ProcessInfo:
        return ProcessInfo(f"Ray's {self.name}", pid=self.process.pid, log=self.log)


def private_processes() -> list[RayProcess]:
    """Return the processes without which the cluster that this process started cannot work; [] if it joined a cluster."""
    node: Any = ray._private.worker._global_node
    started: Mapping[str, list[Any]] = {} if node is None else node.all_processes
    logs = Path() if node is None else Path(node.get_logs_dir_path())
    return [
        RayProcess(name, info.process, str(logs / log)) for name, log in _LOGS.items() for info in started.get(name, [])
    ]


class RayProcessWatch:
    """Watches processes of Ray in a thread. The first that ends, or is stopped for 20 s, is named on stderr at once.

    Without processes it has no thread. Ray's native code may end this process before the run reports the failure.
    """

    def __init__(self, processes: list[RayProcess]) -> None:
        self._processes = processes
        self._stopped_looks = [0] * len(processes)
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._closed = threading.Event()
        self.failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="megarl-ray-processes", daemon=True)
        if processes:
            self._thread.start()

    def check(self) -> None:
        """Raise ServiceDied if a process has failed."""
        if self.failure is not None:
            raise ServiceDied(self.failure)

    def close(self) -> None:
        """End the watch, before Ray is shut down."""
        self._closed.set()
        if self._processes:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.failure = self._look()
            if self.failure is not None:
                os.write(2, f"{self.failure.place} has failed: {self.failure.cause}\n".encode())
                return

    def _look(self) -> Failure | None:
        for each in self._processes:
            status = each.process.poll()
            if status is not None:
                return Failure.death(each.place, f"{exit_cause(status)}. The run cannot continue without it")
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        stopped = stopped_pids([each.process.pid for each in self._processes])
        for number, each in enumerate(self._processes):
            self._stopped_looks[number] = self._stopped_looks[number] + 1 if each.process.pid in stopped else 0
            if self._stopped_looks[number] >= LOOKS:
                seconds = LOOKS * LOOK_SECONDS
                return Failure(each.place, f"its process has been stopped for {seconds:.0f} s, as by SIGSTOP or Ctrl-Z")
        return None
