"""CPU seconds of the controller's source per group, by number of groups a step and of engines: constant if its time is linear.

    python -m benchmarks.controller [--rounds 3] [--steps 6]

Engines are stand-ins that answer in a random order. `rollout.at_update` is refresh with `max_staleness` 4 and window 0.3, so that
groups overtake and every sample has spans of several versions. The time is spent in `EnginesSource`: admission, assignment to engines,
arrival, release, batches with their metrics, and a garbage collection after each step. A thread waits for each batch meanwhile, as the
controller does. Sizes alternate, and the ratios are of the medians of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from megarl.platform.installed import full_collections_between_steps
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Group, InlineData, Prompt, Sample, Span

# Groups a step, engines, samples of a group
SIZES = ((128, 16, 16), (512, 16, 16), (2048, 16, 16), (512, 128, 16), (2048, 128, 1), (8192, 128, 1))


class Prompts(list[Prompt]):
    """The part of a data set that the source reads."""

    sets: ClassVar = {"train": 97}
    difficulty = None


class Engine:
    """Keeps groups until the benchmark answers them: all groups that it answers at a time share replies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: set[int] = set()
        self._answered: deque[Group] = deque()
        self._call: tuple[int, Future[Any]] | None = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        if method == "submit":
            self.running |= {request.group for request in arguments[0]}
        return done

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        self._call = parts, Future()
        return self._call[1]

    def answer(self, groups: Sequence[Group]) -> None:
        self.running -= {group.number for group in groups}
        self._answered.extend(groups)
        while self._answered and self._call is not None:
            (parts, call), self._call = self._call, None
            taken = [self._answered.popleft() for _ in range(min(parts, len(self._answered)))]
            call.set_result(([(group.number, group) for group in taken], [InlineData([])] * len(taken)))


def group(number: int, version: int, size: int) -> Group:
    spans = tuple(Span(64 * each, max(0, version - 3 + each)) for each in range(4))
    data = InlineData([])
    samples = [Sample(number, index, data, 40, 256, 256, reward=float(index % 2), spans=spans) for index in range(size)]
    return Group(number, f"row/{number}", "train", samples)


def seconds_per_group(prompts: int, engines: int, samples: int, steps: int, seed: int) -> float:
    """Run some steps and return the CPU seconds of the source per trained group, without the time of the stand-ins."""
    recipe, order = Recipe(), random.Random(seed)
    recipe.cluster.placement, recipe.rollout.max_staleness, recipe.rollout.at_update = "disaggregated", 4, "refresh"
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps = prompts, samples, steps
    services = [Engine(f"engine{number}") for number in range(engines)]
    rows = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "train") for i in range(97))
    source = EnginesSource(recipe, rows, [EngineHandle(each) for each in services], [0], lambda: None)  # type: ignore[arg-type]
    spent: list[float] = []

    def timed(action: Callable[[], Any]) -> None:
        begin = time.thread_time()
        action()
        spent.append(time.thread_time() - begin)

    with full_collections_between_steps() as collect_garbage:
        for version in range(steps):
            timed(functools.partial(source.admit, version))
            taking = threading.Thread(target=timed, args=(functools.partial(source.take, prompts),))
            taking.start()
            while not source.admission.closed and taking.is_alive():
                running = [(number, service) for service in services for number in service.running]
                order.shuffle(running)
                by_engine: dict[str, tuple[Engine, list[Group]]] = {}
                for number, service in running[: max(1, len(running) // 8)]:
                    by_engine.setdefault(service.name, (service, []))[1].append(group(number, version, samples))
                for service, groups in by_engine.values():
                    timed(functools.partial(service.answer, groups))
            taking.join()
            timed(collect_garbage)
    return sum(spent) / (steps * prompts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    rounds: dict[tuple[int, int, int], list[float]] = {size: [] for size in SIZES}
    for number in range(options.rounds):
        for size in SIZES:
            rounds[size].append(seconds_per_group(*size, options.steps, number))
    first = statistics.median(rounds[SIZES[0]])
    print(
        "| groups a step | engines | samples of a group | microseconds per group | ratio | s per step |\n|---|---|---|---|---|---|"
    )
    for (prompts, engines, samples), values in rounds.items():
        value = statistics.median(values)
        print(
            f"| {prompts:,} | {engines} | {samples} | {1e6 * value:.0f} | {value / first:.2f} | {prompts * value:.2f} |"
        )


if __name__ == "__main__":
    main()
