"""Process of a keeper (`megarl.cluster.keeper`): ``python -m megarl.cluster.ray.keeper_main FILE ADDRESS SECONDS``.

It owns the workers of a run, and ends them SECONDS after their controller has died, unless another one has attached. When the command
that started it has ended, which closes stdin, it waits for the end of the controller and ends with all workers. If it is killed, its
orphan reaper ends them on this machine, and Ray on others.
"""

from __future__ import annotations

import os
import select
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from megarl.cluster.failures import ServiceDied
from megarl.cluster.keeper import KeeperAddress
from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.ray import env
from megarl.cluster.sigstop_watch import process_fields

LOOK_SECONDS = 0.5  # between looks at the controller


class Unattended:
    """Decides when the workers of a controller that has died end. seconds: for which they are kept."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._since = seconds, 0.0

    def is_over(self, *, lives: bool, has_workers: bool, now: float) -> bool:
        """Return whether there have been workers without a living controller for `seconds`."""
        if lives or not has_workers:
            self._since = 0.0
            return False
        self._since = self._since or now
        return now - self._since >= self.seconds


def main(file: Path, address: str, seconds: float) -> int:
    """Run the keeper and return its exit status."""
    env.prepare(private=not address)
    reaper = OrphanReaper()
    try:
        try:
            nursery, keeper = _start(address, seconds, reaper)
        except Exception as error:  # noqa: BLE001 -- the controller reports it
            KeeperAddress(problem=str(error)).write(file)
            return 1
        keeper.write(file)
        return _keep(nursery, Unattended(seconds), private=not address)
    finally:
        reaper.close()


def _start(address: str, seconds: float, reaper: OrphanReaper) -> tuple[Any, KeeperAddress]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from megarl.cluster.ray.nursery import NAME, Nursery
    from megarl.cluster.ray.processes import private_processes
    from megarl.cluster.ray.signals import ray_get
    from megarl.cluster.ray.start import start

    start(address or None, reaper)
    context, namespace = ray.get_runtime_context(), uuid.uuid4().hex
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    options: dict[str, Any] = {"name": NAME, "namespace": namespace, "num_cpus": 0, "scheduling_strategy": here}
    nursery = ray.remote(Nursery).options(**options, runtime_env={"env_vars": reaper.env}).remote()
    ray_get(nursery.controller.remote())
    processes = tuple((each.name, each.process.pid, each.log) for each in ([] if address else private_processes()))
    return nursery, KeeperAddress(
        context.gcs_address, namespace, reaper.mark, not address, processes, seconds, os.getpid()
    )


def _keep(nursery: Any, unattended: Unattended, *, private: bool) -> int:
    """Look at the controller until the command that started this process ends. Returns an exit status."""
    import ray

    from megarl.cluster.ray.processes import RayProcessWatch, private_processes
    from megarl.cluster.ray.signals import ray_get

    watch, commanded = RayProcessWatch(private_processes() if private else []), True
    try:
        while True:
            watch.check()
            if commanded and select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
                commanded = False
            elif not commanded:
                time.sleep(LOOK_SECONDS)
            pid, has_workers = ray_get(nursery.controller.remote())
            lives = pid != 0 and process_fields(pid)[:1] not in ([], ["Z"])
            if not commanded and not lives:
                break
            if unattended.is_over(lives=lives, has_workers=has_workers, now=time.monotonic()):
                print(
                    f"megarl: no controller for {unattended.seconds:g} s (train.keep_workers): the workers end",
                    file=sys.stderr,
                )
                ray_get(nursery.end.remote())
    except ServiceDied:  # the watch has printed it
        return 1
    watch.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    sys.stderr.flush()
    os._exit(status)  # Ray's exit handlers may wait for processes that have ended
