"""CPU seconds of the start of trainer processes that do nothing, over Ray, by their number, and the growth.

    python -m benchmarks.start_workers [--workers 8 16 32] [--rounds 3] [--target 1024]

`RayCluster.start_trainers` starts real Ray actors with an empty class: their processes, their first reply, the watch over stopped and
ended processes, `construct`. What one process does for all of them (the controller, Ray's GCS, the raylet of this machine) grows with
their number, and the last lines extrapolate it to --target workers. The workers' own CPU seconds are spent on their machines at the
same time. All workers are on one machine here, so its raylet starts them all; in a cluster each machine has a raylet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

PARTS = ("controller", "GCS", "raylet", "one worker")
ENV = {"OMP_NUM_THREADS": "1"}


class Worker:
    """A worker without a model."""


def cpu_by_part() -> Counter[str]:
    """Return the CPU seconds so far of this process, Ray's GCS, the raylet, and all workers together."""
    spent: Counter[str] = Counter({"controller": time.process_time()})
    for child in psutil.Process().children(recursive=True):
        try:
            command, times = child.cmdline(), child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        program = Path(command[0]).name if command else ""
        worker = program.startswith("ray::") or any("default_worker.py" in word for word in command)
        part = {"gcs_server": "GCS", "raylet": "raylet"}.get(program, "one worker" if worker else "other")
        spent[part] += times.user + times.system
    return spent


def start(workers: int) -> dict[str, float]:
    """Start and end `workers` processes; returns the wall seconds and the CPU seconds of `PARTS`."""
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    with tempfile.TemporaryDirectory() as logs:
        devices = RayDevices(None, "", Demand(workers, 0, 1, shared=False))
        with RayCluster(None, devices, Path(logs), trainer_env=ENV, stall=0.0) as cluster:
            time.sleep(3.0)  # Ray's own start
            before, began = cpu_by_part(), time.monotonic()
            group = cluster.start_trainers(f"{__name__}:Worker", workers, ())
            wall, spent = time.monotonic() - began, cpu_by_part()
            spent.subtract(before)
            group.shutdown()
    return {"wall": wall, **{part: spent[part] / (workers if part == "one worker" else 1) for part in PARTS}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=int, default=1024, help="workers of the extrapolation")
    options = parser.parse_args(arguments)

    from megarl.cluster.ray import env

    env.prepare(private=True)
    load = os.getloadavg()[0]
    rounds = [{workers: start(workers) for workers in options.workers} for _ in range(options.rounds)]
    names = ["wall", *PARTS]
    medians = {
        workers: {name: statistics.median(each[workers][name] for each in rounds) for name in names}
        for workers in options.workers
    }
    print(f"Load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores\n")
    print("| workers |", " | ".join(["wall s", *(f"{part}, CPU s" for part in PARTS)]), "|")
    print("|---|", "---|" * len(names), sep="")
    for workers, seconds in medians.items():
        print(f"| {workers} |", " | ".join(f"{seconds[name]:.2f}" for name in names), "|")
    if len(options.workers) > 1:
        for part in PARTS[:3]:
            line = np.polyfit(options.workers, [medians[workers][part] for workers in options.workers], 1)
            print(
                f"{part}: {1e3 * line[0]:.1f} ms per worker, {np.polyval(line, options.target):.1f} s for {options.target:,}"
            )


if __name__ == "__main__":
    from benchmarks import start_workers  # Ray's processes import the class by this name

    start_workers.main()
