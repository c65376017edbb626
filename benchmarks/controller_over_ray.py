"""CPU seconds of the controller for the calls of a step over Ray, by number of trainer ranks, and their growth.

    python -m benchmarks.controller_over_ray [--ranks 16 32 48] [--samples 8192] [--group 16] [--spread 0] [--rounds 3]

Real Ray actors without a model: trainer ranks in data-parallel ranks of 16, and --engines with the vectors of all groups, which finish
evenly over --spread seconds. Groups are collected with one call each, and as in a run (`GroupCollector`), by turns. Each
data-parallel rank trains on 128 samples, drawn from all groups, as 64 of them would share 8,192 samples. So the seconds grow
linearly with the ranks, and the last lines extrapolate to --target ranks. CPU seconds of the controller's process, all threads.
Each round measures every number of ranks with direct calls and with relays (`megarl.cluster.ray.relay`), one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.platform.installed import full_collections_between_steps
from megarl.recipe.schema import Recipe
from megarl.rollout.collect.finished import FinishedGroup, FinishedGroups, Scored
from megarl.rollout.engine_handle import EngineHandle
from megarl.types import DataRef, Group, InlineData, Metrics, Sample, SampleTokens, Shard, ShardSample, Span, fetch

WIDTH = 16  # ranks of a data-parallel rank: tensor x pipeline x context parallel
SAMPLES_OF_RANK = 128
ENV = {"OMP_NUM_THREADS": "1"}
COLLECT = "collect, shared calls"


class Engine:
    """Finishes groups without sampling."""

    def __init__(self) -> None:
        self._finished = FinishedGroups()
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, numbers: Sequence[int], samples: int, tokens: int, spread: float) -> None:
        """Finish the groups with these numbers, evenly over `spread` seconds."""

        async def finish() -> None:
            began = time.monotonic()
            for index, number in enumerate(numbers):
                await asyncio.sleep(max(0.0, began + spread * index / len(numbers) - time.monotonic()))
                self._finished.add(number, finished_group(number, samples, tokens))

        self._tasks = {asyncio.get_running_loop().create_task(finish())}

    async def collect(self, most: int) -> tuple[list[FinishedGroup], list[list[SampleTokens]]]:
        return await self._finished.take(most)

    async def collect_one(self) -> tuple[FinishedGroup, list[SampleTokens]]:
        """Return the next group: one call for each."""
        control, vectors = await self._finished.take(1)
        return control[0], vectors[0]


def finished_group(number: int, samples: int, tokens: int) -> Scored:
    control = [
        Sample(number, index, InlineData([]), 40, tokens - 40, tokens - 40, reward=0.5, spans=(Span(0, 1), Span(64, 2)))
        for index in range(samples)
    ]
    vectors = [
        SampleTokens(np.zeros(tokens, np.int32), np.ones(tokens, bool), np.zeros(tokens, np.float32))
        for _ in range(samples)
    ]
    return Group(number, f"row/{number}", "train", control), vectors


class Rank:
    """A trainer rank that fetches its vectors and computes nothing."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.tokens = 0

    def describe(self) -> dict[str, Any]:
        return {"dp_rank": self.rank // WIDTH, "dp_size": 1, "reports": self.rank % WIDTH == 0, "pid": os.getpid()}

    def gather_vectors(self, samples: list[ShardSample]) -> tuple[None, list[list[SampleTokens]]]:
        return None, [fetch(samples)]

    def load_shard(self, shard: Shard) -> None:
        self.tokens = sum(len(vectors.tokens) for vectors in fetch(shard.samples))

    def update_actor(self, kl_weight: float, scales: list[float] | None) -> list[Metrics] | None:
        metrics = {f"actor/metric_{number}": kl_weight for number in range(30)}
        return [metrics] * 4 if self.rank % WIDTH == 0 else None

    def loaded_tokens(self) -> int:
        return self.tokens


def shards_of(data: Sequence[DataRef], group: int, tokens: int, count: int, seed: int) -> list[Shard]:
    """Return the shards of `count` data-parallel ranks: samples at random of all groups, in 4 mini batches."""
    order = random.Random(seed)
    shards = []
    for _ in range(count):
        numbers = order.sample(range(len(data) * group), SAMPLES_OF_RANK)
        samples = [
            ShardSample(data[number // group], number % group, tokens, number, number // group, 1.0, 0.5, 1e-4)
            for number in numbers
        ]
        quarter = SAMPLES_OF_RANK // 4
        mini_batches = [[[*range(first, first + quarter)]] for first in range(0, SAMPLES_OF_RANK, quarter)]
        shards.append(Shard(samples, mini_batches, [quarter * tokens] * 4))
    return shards


def first_ranks(group: Any, size: int) -> Any:
    """Return a group of the first `size` processes of `group`. Each group has separate relays."""
    return type(group)(group._cluster, "trainer", group._actors[:size], group._places[:size], group.nodes[:size])


def cpu_of(action: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process for `action`, and a moment after it, in which Ray's threads release references."""
    begin = time.process_time()
    action()
    time.sleep(0.3)
    return time.process_time() - begin


def collected(engines: Sequence[Any], options: argparse.Namespace, shared: bool) -> list[DataRef]:
    """Collect all groups of a step; returns the locations of their vectors. shared: several groups share a call."""
    count = options.samples // options.group
    for first, engine in enumerate(engines):
        numbers = range(first, count, len(engines))
        engine.call("submit", numbers, options.group, options.tokens, options.spread).result()
    if not shared:
        calls = [engines[number % len(engines)].call_with_data("collect_one") for number in range(count)]
        by_number = {finished[0]: data for finished, data in (call.result() for call in calls)}
        return [by_number[number] for number in range(count)]
    handles = [EngineHandle(engine) for engine in engines]
    results = [handles[number % len(engines)].collect(number) for number in range(count)]
    return [result.result()[1] for result in results]


def cpu_seconds(
    cluster: Any, group: Any, engines: Sequence[Any], options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Return the CPU seconds of one step's calls, by kind of call."""
    from megarl.trainer.group import TrainerGroup

    trainers = TrainerGroup(group, Recipe())
    trainers.describe()
    data: list[DataRef] = []
    seconds = {"collect, a call per group": cpu_of(lambda: collected(engines, options, shared=False))}
    seconds[COLLECT] = cpu_of(lambda: data.extend(collected(engines, options, shared=True)))
    shards = shards_of(data, options.group, options.tokens, group.size // WIDTH, seed)
    seconds["load shards"] = cpu_of(lambda: trainers.load_shards(shards))
    assert group.call("loaded_tokens") == [SAMPLES_OF_RANK * options.tokens] * group.size
    calls = 20
    seconds["one call"] = cpu_of(lambda: [group.call("update_actor", 0.1, None) for _ in range(calls)]) / calls
    seconds["one check"] = cpu_of(lambda: [group.check() for _ in range(calls)]) / calls
    return seconds


def measure(options: argparse.Namespace) -> dict[tuple[bool, int], dict[str, float]]:
    """Return the medians of `cpu_seconds` by use of relays and number of ranks."""
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray import env

    env.prepare(private=True)
    from megarl.cluster.ray import relay
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    cases = [(relayed, ranks) for ranks in options.ranks for relayed in (False, True)]
    rounds: dict[tuple[bool, int], list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as logs:
        # Groups of one Ray cluster, of which each round uses one: a group of fewer ranks is a part of the largest.
        devices = RayDevices(None, "", Demand(max(options.ranks), options.engines, 1, shared=True))
        with RayCluster(None, devices, Path(logs), trainer_env=ENV, stall=0.0) as cluster:
            engines = [
                cluster.start_service(f"{__name__}:Engine", (), name=f"engine{number}", devices=1, env=ENV)
                for number in range(options.engines)
            ]
            whole = cluster.start_trainers(f"{__name__}:Rank", max(options.ranks), ())
            groups = {(relayed, ranks): first_ranks(whole, ranks) for relayed, ranks in cases}
            with (
                full_collections_between_steps() as collect_garbage
            ):  # `benchmarks.controller` measures the collections
                for seed in range(options.rounds + 1):
                    for case, group in groups.items():
                        relay.DIRECT_RANKS = 0 if case[0] else max(options.ranks)
                        seconds = cpu_seconds(cluster, group, engines, options, seed)
                        rounds[case] += [seconds] if seed else []  # the first round starts threads and connections
                        collect_garbage()
            for group in groups.values():
                if group._relays is not None:
                    group._relays.kill()
    return {
        case: {name: statistics.median(each[name] for each in of_case) for name in of_case[0]}
        for case, of_case in rounds.items()
    }


def step_seconds(seconds: dict[str, float], collect: float, calls: int) -> float:
    """Return the CPU seconds of a step with `calls` calls after the shards are loaded. collect: seconds for all groups."""
    return collect + seconds["load shards"] + calls * seconds["one call"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 48])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--group", type=int, default=16, help="samples of a group")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--spread", type=float, default=0.0, help="seconds over which the groups finish")
    parser.add_argument("--tokens", type=int, default=1000, help="of a sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=4, help="of a step, after the shards are loaded")
    parser.add_argument("--target", type=int, default=1024, help="ranks of the extrapolation")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    measured = measure(options)
    print(f"Load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores\n")
    names = list(measured[False, options.ranks[0]])
    grows = names[2:]  # with the ranks; groups are collected alike for any number of them
    at: dict[bool, dict[str, float]] = {}
    print("| calls | ranks |", " | ".join(names), "|")
    print("|---|---|", "---|" * len(names), sep="")
    for relayed, label in ((False, "direct"), (True, "relays")):
        for ranks in options.ranks:
            print(f"| {label} | {ranks} |", " | ".join(f"{measured[relayed, ranks][name]:.3f}" for name in names), "|")
        if len(options.ranks) > 1:
            lines = {n: np.polyfit(options.ranks, [measured[relayed, r][n] for r in options.ranks], 1) for n in grows}
            at[relayed] = {name: float(np.polyval(lines[name], options.target)) for name in grows}
            print(f"| {label}: ms per rank | | |", " | ".join(f"{1e3 * lines[name][0]:.2f}" for name in grows), "|")
            values = " | ".join(f"{at[relayed][name]:.2f}" for name in grows)
            print(f"| {label}: by the line | {options.target:,} | |", values, "|")
    if at:
        print("| relays / direct | | |", " | ".join(f"{at[True][name] / at[False][name]:.2f}" for name in grows), "|")
        print(f"\nA step with {options.calls} further calls at {options.target:,} ranks, in seconds:")
        for name in names[:2]:
            seconds = statistics.median(each[name] for each in measured.values())
            direct, relayed_ = (step_seconds(at[case], seconds, options.calls) for case in (False, True))
            print(f"{name} ({seconds:.2f}): {direct:.2f} with direct calls, {relayed_:.2f} with relays")


if __name__ == "__main__":
    from benchmarks import controller_over_ray  # Ray's processes import the classes by this name

    controller_over_ray.main()
