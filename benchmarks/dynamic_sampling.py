"""Steps with dynamic sampling against steps without a filter, by `rollout.max_staleness` and `dynamic_sampling.oversample`.

    python -m benchmarks.dynamic_sampling [--filtered 0.5] [--steps 8] [--engines 64] [--requests 64]

megarl's source of batches (`EnginesSource`: admission, assignment to engines, filter, batches) runs under a virtual clock with the
engines of `megarl simulate`: `--requests` at a time, a token every 15 ms and 0.1 ms for each running request. A step has 512 groups of
16 samples with log-normal lengths (mean 2,000, at most 20,000 tokens; half of the variance of the logarithm between groups). Training
takes no time, so a ratio is the largest that a run can have.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import os
import statistics
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megarl.commands.simulate.engine import Costs, FinishedSample, VirtualEngine
from megarl.commands.simulate.group_filter import DrawnFilter
from megarl.commands.simulate.lengths import DrawnLengths, LogNormal
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Group, InlineData, Prompt, Sample, Span

LENGTHS = LogNormal(median=1250, p99=12_800, longest=20_000, prompt=500)
WARM_UP = 2  # steps that are not measured


class Prompts(list[Prompt]):
    """The part of a data set that the source reads."""

    sets: ClassVar = {"train": 97}
    difficulty = None


class Clock:
    """The virtual time, and the engines' next finished requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []  # (time, engine, epoch)


class Engine:
    """An engine's process: its requests take virtual time, and its groups arrive as a real engine's do."""

    def __init__(self, index: int, clock: Clock, costs: Costs, lengths: DrawnLengths, samples: int, drawn: DrawnFilter):
        self.name, self.index, self.clock, self.drawn = f"engine{index}", index, clock, drawn
        self.virtual, self.lengths, self.samples = VirtualEngine(costs), lengths, samples
        self.answered: deque[Group] = deque()
        self.collecting: tuple[int, Future[Any]] | None = None
        self.finished: dict[int, list[FinishedSample]] = {}
        self.epoch = 0

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        assert method == "submit", method
        self.virtual.advance(self.clock.now)
        for request in arguments[0]:
            self.virtual.add(request.group, self.lengths.of(request.group))
        self.plan()
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        assert method == "collect", method
        call: Future[Any] = Future()
        self.collecting = parts, call
        self.reply()
        return call

    def reply(self) -> None:
        """End the call that waits for groups, if any has finished."""
        if self.collecting is None or not self.answered:
            return
        (parts, call), self.collecting = self.collecting, None
        groups = [self.answered.popleft() for _ in range(min(parts, len(self.answered)))]
        call.set_result(([(group.number, group) for group in groups], [InlineData([]) for _ in groups]))

    def plan(self) -> None:
        """Enter the next finish into the clock, and void the former one."""
        self.epoch += 1
        time = self.virtual.next_finish()
        if time is not None:
            heapq.heappush(self.clock.events, (time, self.index, self.epoch))

    def update(self, version: int) -> None:
        """Take new weights; running requests continue with recomputed KV caches."""
        self.virtual.advance(self.clock.now)
        self.virtual.update(version, 0.0, refresh=True)
        self.plan()

    def answer(self) -> None:
        """Return the groups that are finished at the clock's time."""
        self.virtual.advance(self.clock.now)
        complete = []
        for sample in self.virtual.finish():
            samples = self.finished.setdefault(sample.group, [])
            samples.append(sample)
            if len(samples) == self.samples:
                complete.append(self.finished.pop(sample.group))
        self.plan()
        for samples in complete:
            number = samples[0].group
            spread = self.drawn.passes(number)
            group = [
                Sample(
                    number, index, InlineData([]), int(LENGTHS.prompt), one.length, one.length,
                    reward=float(spread and index % 2), spans=(Span(0, one.oldest),),
                )
                for index, one in enumerate(samples)
            ]  # fmt: skip
            self.answered.append(Group(number, f"row/{number}", "train", group))
        self.reply()


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    filtered: bool
    max_staleness: float = 0
    oversample: float = 1.0
    at_update: str = "auto"
    admission: str | None = None

    def recipe(self, prompts: int, samples: int, steps: int) -> Recipe:
        recipe = Recipe()
        recipe.cluster.placement = "disaggregated"
        recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps = prompts, samples, steps
        recipe.rollout.max_staleness, recipe.rollout.at_update = self.max_staleness, self.at_update  # type: ignore[assignment]
        recipe.rollout.admission = self.admission  # type: ignore[assignment]
        recipe.algorithm.overlong.penalty_buffer = 0
        dynamic = recipe.algorithm.dynamic_sampling
        dynamic.enabled, dynamic.oversample, dynamic.max_attempts = self.filtered, self.oversample, 30
        return recipe


CASES = [
    Case("no filter, synchronous", filtered=False),
    Case("synchronous", filtered=True),
    Case("synchronous, replacements at once", filtered=True, admission="continuous"),
    Case("synchronous, oversample 2.2", filtered=True, oversample=2.2),
    Case("synchronous, oversample 3", filtered=True, oversample=3.0),
    Case("max_staleness 0.2, drain, oversample 2", filtered=True, max_staleness=0.2, at_update="drain", oversample=2.0),
    Case("max_staleness 0.2, refresh, oversample 2", filtered=True, max_staleness=0.2, oversample=2.0),
    Case("no filter, max_staleness 1, refresh", filtered=False, max_staleness=1),
    Case("max_staleness 1, refresh", filtered=True, max_staleness=1),
    Case("max_staleness 1, refresh, oversample 2.2", filtered=True, max_staleness=1, oversample=2.2),
    Case("no filter, max_staleness 4, refresh", filtered=False, max_staleness=4),
    Case("max_staleness 4, refresh", filtered=True, max_staleness=4),
]


def costs(engines: int, requests: int = 64) -> Costs:
    """Return the assumed seconds of the docstring, for engines that run at most `requests` at a time."""
    decode = 0.015 + 0.0001 * np.arange(requests + 1)
    return Costs(engines, decode, prefill=5e-5, training=0.0, weight_sync=0.0, prompt=LENGTHS.prompt)


@dataclass
class Figures:
    """Means over the measured steps, and the largest lag."""

    step: float  # seconds
    tried: float  # groups per trained group
    unused: float  # share of the finished groups that no batch took
    lag: float
    most: int
    trained: list[list[int]]  # numbers of the groups of each batch


def simulate(
    case: Case,
    steps: int,
    engines: int = 64,
    prompts: int = 512,
    samples: int = 16,
    filtered: float = 0.5,
    requests: int = 64,
) -> Figures:
    """Run `WARM_UP` and `steps` measured steps of `case`; each engine runs at most `requests` at a time."""
    recipe, clock = case.recipe(prompts, samples, WARM_UP + steps + 50), Clock()
    lengths, drawn = DrawnLengths(LENGTHS, samples, seed=0), DrawnFilter(filtered if case.filtered else 0.0, seed=0)
    assumed = costs(engines, requests)
    services = [Engine(index, clock, assumed, lengths, samples, drawn) for index in range(engines)]
    rows = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "train") for i in range(97))
    source = EnginesSource(recipe, rows, [EngineHandle(each) for each in services], [0], lambda: None)  # type: ignore[arg-type]
    drains = update_rule(recipe) == "drain"
    ends, lags, tried, unused, trained = [], [], 0.0, 0.0, []
    for version in range(WARM_UP + steps):
        source.admit(version)
        until(clock, services, source._has_batch)
        batch = source.take(prompts)
        assert case.max_staleness or not source.admission.running, "engines on the trainers' devices sleep now"
        if drains:
            until(clock, services, source.admission.idle)
        source.drain()
        for service in services:
            service.update(version + 1)
        ends.append(clock.now)
        trained.append([group.number for group in batch.groups])
        if version >= WARM_UP:
            lags += [version - sample.version for group in batch.groups for sample in group.samples]
            tried += batch.metrics["rollout/prompts_tried"]
            unused += batch.metrics.get("rollout/groups_unused", 0.0)
    step = (ends[-1] - ends[WARM_UP - 1]) / steps
    done = tried + unused
    return Figures(step, done / (steps * prompts), unused / done, statistics.mean(lags), max(lags), trained)


def until(clock: Clock, engines: Sequence[Engine], condition: Any) -> None:
    """Move the clock from event to event until `condition` holds."""
    while not condition():
        clock.now, index, epoch = heapq.heappop(clock.events)
        if epoch == engines[index].epoch:
            engines[index].answer()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filtered", type=float, default=0.5, help="share of the groups that the filter removes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64, help="requests that an engine runs at a time")
    parser.add_argument(
        "--only", default="", help="print only cases with this text in their name; the first always runs"
    )
    options = parser.parse_args(arguments)
    print(
        f"{options.filtered:.0%} of the groups filtered, {options.engines} engines of {options.requests} requests, load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| step / unfiltered synchronous | case | step, s | groups sampled per trained | unused | lag, most |\n|---|---|---|---|---|---|"
    )
    run = functools.partial(
        simulate, steps=options.steps, engines=options.engines, requests=options.requests, filtered=options.filtered
    )
    first = run(CASES[0]).step
    for case in CASES:
        if options.only not in case.name:
            continue
        figures = run(case)
        print(
            f"| {figures.step / first:.2f} | {case.name} | {figures.step:.0f} | {figures.tried:.2f} | {figures.unused:.1%} "
            f"| {figures.lag:.2f}, {figures.most} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
