"""Seconds of the controller per group, by number of groups a step and of engines: constant if its time is linear.

    python -m benchmarks.controller [--rounds 3] [--steps 6]

Engines are stand-ins that answer in a random order. `rollout.at_update` is refresh with `max_staleness` 4 and window 0.3, so that
groups overtake and every sample has spans of several versions. The time is spent in `EnginesSource`: admission, assignment to engines,
arrival, release and batches with their metrics. Sizes alternate, and the ratios are of the medians of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Group, InlineData, Prompt, Sample, Span

SAMPLES = 16
SIZES = ((128, 16), (512, 16), (2048, 16), (512, 64), (512, 256))  # groups a step, engines


class Prompts(list[Prompt]):
    """The part of a data set that the source reads."""

    sets: ClassVar = {"train": 97}
    difficulty = None


class Engine:
    """Keeps groups until the benchmark answers them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: dict[int, Future[Any]] = {}

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def call_with_data(self, method: str, number: int) -> Future[Any]:
        self.running[number] = Future()
        return self.running[number]


def group(number: int, version: int) -> Group:
    spans = tuple(Span(64 * each, max(0, version - 3 + each)) for each in range(4))
    data = InlineData([])
    samples = [
        Sample(number, index, data, 40, 256, 256, reward=float(index % 2), spans=spans) for index in range(SAMPLES)
    ]
    return Group(number, f"row/{number}", "train", samples)


def seconds_per_group(prompts: int, engines: int, steps: int, seed: int) -> float:
    """Run some steps and return the seconds of the source per trained group, without the time of the stand-ins."""
    recipe, order = Recipe(), random.Random(seed)
    recipe.cluster.placement, recipe.rollout.max_staleness, recipe.rollout.at_update = "disaggregated", 4, "refresh"
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps = prompts, SAMPLES, steps
    services = [Engine(f"engine{number}") for number in range(engines)]
    rows = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "train") for i in range(97))
    source = EnginesSource(recipe, rows, [EngineHandle(each) for each in services], [0], lambda: None)  # type: ignore[arg-type]
    seconds = 0.0
    for version in range(steps):
        begin = time.perf_counter()
        source.admit(version)
        seconds += time.perf_counter() - begin
        while not source.admission.closed:
            running = [(number, service) for service in services for number in service.running]
            order.shuffle(running)
            for number, service in running[: max(1, len(running) // 8)]:
                answer = (group(number, version), InlineData([]))
                begin = time.perf_counter()
                service.running.pop(number).set_result(answer)
                seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        source.take(prompts)
        seconds += time.perf_counter() - begin
    return seconds / (steps * prompts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    rounds: dict[tuple[int, int], list[float]] = {size: [] for size in SIZES}
    for number in range(options.rounds):
        for size in SIZES:
            rounds[size].append(seconds_per_group(*size, options.steps, number))
    first = statistics.median(rounds[SIZES[0]])
    print("groups a step  engines  microseconds per group  ratio")
    for (prompts, engines), values in rounds.items():
        value = statistics.median(values)
        print(f"{prompts:13,}  {engines:7,}  {1e6 * value:22.0f}  {value / first:5.2f}")


if __name__ == "__main__":
    main()
