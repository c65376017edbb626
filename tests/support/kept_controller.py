"""A controller with workers that belong to a keeper: ``python -m tests.support.kept_controller LOGS SETTINGS``.

It prints the process ids of its workers as JSON, whether they are kept, and why others are not, and then obeys its stdin: "busy" begins a call of 4 s to the trainers and
kills this process, "die" kills trainer rank 1 and this process, "fail" lets a call fail and kills it, "end" shuts the cluster down. At the end of stdin it kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.keeper import KeeperAddress
from megarl.cluster.ray import env as ray_env
from tests.support.cluster_workers import ROOT, Engine
from tests.support.ray_services import ENGINE_ENV, THREADS

TRAINER, ENGINE = "tests.support.cluster_workers:Reducer", "tests.support.kept_controller:KeptEngine"


class KeptEngine(Engine):
    """A service that may serve another controller, unless its scale is 13."""

    def __init__(self, scale: int) -> None:
        super().__init__(scale)
        self.released = 0

    async def release(self) -> bool:
        self.released += 1
        return bool(self.scale != 13)

    def releases(self) -> int:
        return self.released


def main(logs: Path, settings: str) -> None:
    ray_env.prepare(private=True)
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    keeper = KeeperAddress.of_environment(os.environ)
    devices = RayDevices(None, "", Demand(2, 2, shared=False))
    cluster = RayCluster(None, devices, logs, trainer_env=THREADS, stall=0.0, keeper=keeper)

    def engine(name: str, scale: int) -> Any:
        return cluster.start_service(ENGINE, (scale,), name=name, devices=1, env=ENGINE_ENV, settings=settings)

    engines = [engine("engine0", 3), engine("engine1", 13)]
    trainers = cluster.start_trainers(TRAINER, 2, (), settings=settings)
    cluster.check()
    pids = [place[1] for place in trainers.call("identify")]
    assert trainers.call("sum", 2) == [4.0, 4.0]  # in the same process group
    assert engines[0].call("scaled", 2).result(timeout=60) == 6
    engine_pids = [each.call("child_pid").result(timeout=60) for each in engines]
    print(
        json.dumps([pids, engine_pids, trainers.kept, [each.kept for each in engines], cluster.not_taken]), flush=True
    )
    word = sys.stdin.readline().strip()
    if word == "busy":
        for actor in trainers._actors:
            actor.call.remote("sum_slowly", (1, 4.0))
        time.sleep(1.0)
    if word == "fail":
        trainers._actors[0].call.remote("no_such_method", ())
        time.sleep(1.0)
    if word == "die":
        os.kill(pids[1], signal.SIGKILL)
    if word == "end":
        cluster.shutdown()
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Controller:
    """A `kept_controller` in a process. environ: with the keeper's variables."""

    def __init__(self, logs: Path, environ: Mapping[str, str], settings: str = "settings") -> None:
        command = [sys.executable, "-m", "tests.support.kept_controller", str(logs), settings]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def workers(self) -> tuple[list[int], list[list[int]], bool, list[bool], list[str]]:
        """Return pids of the trainers and (pid, pid of the child) of the engines, which are kept, and why others are not."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the controller ended with status {self.process.wait()}"
        trainers, engines, trainers_kept, engines_kept, not_taken = json.loads(line)
        return trainers, engines, trainers_kept, engines_kept, not_taken

    def end(self, word: str) -> None:
        """Let the controller end in the way of `word`, and wait."""
        self.process.communicate(word, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
