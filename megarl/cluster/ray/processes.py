"""The processes of a private Ray cluster (raylet, GCS). Ray reports their end or stop late or not at all."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node

from megarl.cluster.failures import Failure, ProcessInfo, ServiceDied, exit_cause
from megarl.cluster.sigstop_watch import LocalWatch, process_fields

POLL_SECONDS = 0.2
_LOGS = {"raylet": "raylet.out", "gcs_server": "gcs_server.out"}
# Methods of Ray's node (ray/_private/node.py, 2.60) that start the autoscaler, the reader of workers' logs, and the server of the
# dashboard. megarl adds no machines, writes logs itself, and starts no dashboard.
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start a cluster without the three processes that a private one does not use.

    They cost 1.6 of 4.2 s of CPU and 275 of 800 MB. `ray.init` has no option for them; `ray start` has ``--no-monitor``.
    """
    originals = {name: getattr(Node, name) for name in _UNUSED if hasattr(Node, name)}
    for name in originals:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray. `log`: its output file."""

    name: str
    process: subprocess.Popen[bytes]
    log: str

    @property
    def place(self) -> ProcessInfo:
        return ProcessInfo(f"Ray's {self.name}", pid=self.process.pid, log=self.log)

    def end(self) -> str | None:
        """Return how the process has ended; None while it runs."""
        status = self.process.poll()
        return None if status is None else exit_cause(status)


@dataclass(frozen=True)
class KeepersRayProcess:
    """A process of Ray that the keeper has started (`megarl.cluster.keeper`): its exit status is not known here.

    keeper: process id of the keeper, whose end ends this process, too.
    """

    name: str
    pid: int
    log: str
    keeper: int

    @property
    def place(self) -> ProcessInfo:
        return ProcessInfo(f"Ray's {self.name}", pid=self.pid, log=self.log)

    def end(self) -> str | None:
        """Return how the process has ended; None while it runs."""
        if not _has_ended(self.pid):
            return None
        keeper = f"the process that keeps the workers (train.keep_workers, pid {self.keeper})"
        return f"{keeper} has ended, and this process too" if _has_ended(self.keeper) else "its process has ended"


def _has_ended(pid: int) -> bool:
    return process_fields(pid)[:1] in ([], ["Z"])


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

    def __init__(self, processes: Sequence[RayProcess | KeepersRayProcess]) -> None:
        self._processes = processes
        self._stopped = LocalWatch([each.place for each in processes], "the run", ServiceDied)
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
            cause = each.end()
            if cause is not None:
                return Failure.death(each.place, f"{cause}. All processes of the run end with it")
        try:
            self._stopped.check()
        except ServiceDied as error:
            return error.failure
        return None
