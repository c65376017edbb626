"""A run under a virtual clock: megarl's `Admission` and the order of its loop, with engines and trainers that only cost time.

A step admits groups, waits for a batch, trains on it, and updates the weights, which engines and trainers wait for. With drain
the engines' requests finish before the update. Engines of groups are chosen by megarl's `Dispatch`. With finish, an update waits
for engines that load weights from host memory. Colocated engines stop while the trainers compute. Dynamic sampling filters drawn
groups (`DrawnFilter`), and admission starts others, as in a run. Scoring, tools and filters take no time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.commands.simulate.engine import Costs, VirtualEngine
from megarl.commands.simulate.group_filter import DrawnFilter
from megarl.commands.simulate.lengths import DrawnLengths
from megarl.commands.simulate.outcome import Outcome, StepRecord, outcome
from megarl.recipe.derived.at_update import UpdateRule, is_continuous, max_lag, update_rule, window_groups
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import Admission, accepted_groups
from megarl.rollout.dispatch import Dispatch, Finishing
from megarl.types import Group, InlineData, Sample, Span

_NO_DATA = InlineData([])


@dataclass(frozen=True)
class AsyncSchedule:
    """Limits for the start of groups and their order in batches, and the handling of running requests at an update."""

    rule: UpdateRule
    max_staleness: float
    prompts: int  # groups of a batch
    window: int = 1  # groups
    max_lag: int = 0  # bound of the lag of a token, in versions
    refresh_after: int | None = None  # with keep: age in versions at which KV caches are recomputed
    colocated: bool = False  # engines stop while the trainers compute
    continuous: bool | None = None  # replacements of filtered groups start at once; None: unless the rule is drain
    max_attempts: int | None = None  # groups tried per group of a batch; None: no group is filtered
    oversample: float = 1.0  # groups that start for each place

    @classmethod
    def of(cls, recipe: Recipe) -> AsyncSchedule:
        dynamic = recipe.algorithm.dynamic_sampling
        return cls(
            rule=update_rule(recipe),
            max_staleness=recipe.rollout.max_staleness,
            prompts=recipe.data.prompts_per_step,
            window=window_groups(recipe),
            max_lag=max_lag(recipe),
            refresh_after=recipe.rollout.refresh_after,
            colocated=recipe.cluster.placement == "colocated",
            continuous=is_continuous(recipe),
            max_attempts=dynamic.max_attempts if dynamic.enabled else None,
            oversample=dynamic.oversample if dynamic.enabled else 1.0,
        )


@dataclass
class _GroupProgress:
    """A group from its start to the end of its training step."""

    left: int  # samples that are not finished
    tokens: int = 0  # of finished responses
    versions: float = 0.0  # sum of the weight versions of their tokens
    oldest: int | None = None  # version of the oldest token


@dataclass
class _Pending:
    """Finished samples that were not trained on yet, and the largest values of their number and tokens."""

    samples: int = 0
    tokens: float = 0.0
    most_samples: int = 0
    most_tokens: float = 0.0

    def add(self, samples: int, tokens: float) -> None:
        self.samples += samples
        self.tokens += tokens
        self.most_samples = max(self.most_samples, self.samples)
        self.most_tokens = max(self.most_tokens, self.tokens)


@dataclass
class Simulation:
    """One run. `samples`: per group; `group_filter`: of a schedule with `max_attempts`; None: every group passes."""

    costs: Costs
    schedule: AsyncSchedule
    lengths: DrawnLengths
    samples: int
    group_filter: DrawnFilter | None = None
    now: float = 0.0
    admission: Admission = field(init=False)
    engines: list[VirtualEngine] = field(init=False)
    records: list[StepRecord] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)  # numbers of trained groups, in the order of training

    def __post_init__(self) -> None:
        schedule = self.schedule
        drains = schedule.rule == "drain"
        self.admission = Admission(
            schedule.prompts,
            schedule.max_staleness,
            schedule.max_attempts,
            not drains if schedule.continuous is None else schedule.continuous,
            window=schedule.window,
            oversample=schedule.oversample,
            drains=drains,
        )
        self.engines = [VirtualEngine(self.costs) for _ in range(self.costs.engines)]
        self._groups: dict[int, _GroupProgress] = {}
        self._engine_of: dict[int, int] = {}
        most_groups = math.ceil(schedule.oversample * schedule.prompts)
        finishing = Finishing.of(schedule.rule, schedule.max_staleness, most_groups)
        self._dispatch = Dispatch(len(self.engines), finishing)
        self._epochs = [0] * len(self.engines)  # an event of an earlier epoch is void
        self._events: list[tuple[float, int, int]] = []  # (time, engine, epoch): its next finished request
        self._loads: dict[int, float] = {}  # engines that load weights from host memory -> end
        self._pending = _Pending()
        self._unused = 0  # groups that no batch takes, of this step
        self._version = 0  # of the newest weights

    def run(self, steps: int, warmup: int) -> Outcome:
        """Simulate `warmup` steps, which the outcome leaves out, and `steps` further ones."""
        for step in range(1, warmup + steps + 1):
            self._step(step - 1)
        return outcome(
            self.records,
            warmup,
            self.costs.engines,
            samples=self.samples,
            sampled_length=self._sampled_length(),
            pending=(self._pending.most_samples, self._pending.most_tokens),
        )

    def _step(self, version: int) -> None:
        begin = self.now
        self.admission.version = version
        self._dispatch.add_version(version)
        self._start_groups()
        self._until(self._has_batch)
        tried = self.admission.closed.popleft()
        batch = [group.number for group in accepted_groups(tried)]
        waited = self.now - begin
        groups = [self._groups.pop(number) for number in batch]
        self.trained += batch
        responses = sum(group.tokens for group in groups)
        tokens = responses + len(groups) * self.samples * self.costs.prompt
        training = self.costs.hand_over + tokens * self.costs.training
        if self.schedule.colocated:
            self._pause_engines(training)
        self._work(training)
        self._pending.add(-len(groups) * self.samples, -tokens)
        drain_begin = self.now
        if self.schedule.rule == "drain":
            self._until(self.admission.idle)
        drained = self.now - drain_begin
        weight_sync = self._update(version + 1)
        self._work(weight_sync)
        for engine in self.engines:
            engine.advance(self.now)
        self.records.append(
            StepRecord(
                end=self.now,
                responses=responses,
                tokens=tokens,
                groups=len(groups),
                tried=len(tried),
                unused=self._unused,
                missing=self.schedule.prompts - len(groups),
                waited=waited + drained,
                training=training,
                weight_sync=weight_sync,
                lag=version * responses - sum(group.versions for group in groups),
                max_lag=max((version - (group.oldest or 0) for group in groups), default=0),
                busy=sum(engine.busy for engine in self.engines),
                request_seconds=sum(engine.request_seconds for engine in self.engines),
                recomputed=sum(engine.recomputed for engine in self.engines),
            )
        )
        self._unused = 0

    def _has_batch(self) -> bool:
        """Return whether a batch is complete. Without staleness, surplus groups must have ended, too: see `EnginesSource`."""
        return bool(self.admission.closed) and not (self.schedule.max_staleness == 0 and self.admission.running)

    def _start_groups(self) -> None:
        """Start all groups that admission allows."""
        touched = set()
        engines = self._dispatch.start(self.admission.capacity)
        for number, index in zip(self.admission.start(len(engines)), engines, strict=True):
            if index not in touched:
                self.engines[index].advance(self.now)
                touched.add(index)
            self._groups[number] = _GroupProgress(self.samples)
            self._engine_of[number] = index
            self.engines[index].add(number, self.lengths.of(number))
        for index in touched:
            self._plan(index)
        self._load_weights()

    def _load_weights(self) -> None:
        """Let engines that have finished their groups load the newest weights."""
        for index in self._dispatch.take_due_loads():
            self.engines[index].advance(self.now)
            self.engines[index].update(self._version, self.costs.load, refresh=False)
            self._loads[index] = self.now + self.costs.load
            self._epochs[index] += 1
            heapq.heappush(self._events, (self._loads[index], index, self._epochs[index]))

    def _plan(self, index: int) -> None:
        """Enter the engine's next finish, and void its former one."""
        self._epochs[index] += 1
        time = self.engines[index].next_finish()
        if time is not None:
            heapq.heappush(self._events, (time, index, self._epochs[index]))

    def _handle_event(self) -> None:
        """Move the clock to the next event, and record the samples that its engine has finished."""
        self.now, index, epoch = heapq.heappop(self._events)
        if epoch != self._epochs[index]:
            return
        if index in self._loads:
            del self._loads[index]
            self._dispatch.loaded(index, self.engines[index].version)
            self._start_groups()
            return
        engine = self.engines[index]
        engine.advance(self.now)
        complete = []
        for sample in engine.finish():
            group = self._groups[sample.group]
            group.left -= 1
            group.tokens += sample.length
            group.versions += sample.versions
            group.oldest = sample.oldest if group.oldest is None else min(group.oldest, sample.oldest)
            self._pending.add(1, sample.length + self.costs.prompt)
            if group.left == 0:
                complete.append(sample.group)
        self._plan(index)
        for number in complete:
            self._finish_group(number)
            if self.schedule.max_attempts is not None:
                self._start_groups()
        if (
            complete and self.schedule.rule == "finish"
        ):  # with the other rules, places come with versions and filtered groups
            self._start_groups()

    def _finish_group(self, number: int) -> None:
        """Give a finished group to admission, and forget it if no batch takes it."""
        group = self._groups[number]
        self._dispatch.remove(self._engine_of.pop(number))
        accepted = self.group_filter is None or self.group_filter.passes(number)
        oldest = (Span(0, group.oldest or 0),)  # read with over-sampling
        self.admission.finish(Group(number, "", "", [Sample(number, 0, _NO_DATA, 0, 0, 0, spans=oldest)]), accepted)
        unused = self.admission.take_unused().numbers if self.schedule.oversample > 1.0 else []
        self._unused += len(unused)
        for each in [*unused, *([] if accepted else [number])]:
            forgotten = self._groups.pop(each, None)
            if forgotten is not None:
                self._pending.add(-self.samples, -(forgotten.tokens + self.samples * self.costs.prompt))

    def _until(self, condition: Callable[[], bool]) -> None:
        """Handle events, which move the clock, until `condition` holds."""
        while not condition():
            if not self._events:
                raise RuntimeError("no request runs, and the loop waits for one: a fault of the admission")
            self._handle_event()

    def _work(self, seconds: float) -> None:
        """Move the clock by `seconds`, in which the trainers work and engines go on."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._handle_event()
        self.now = end

    def _pause_engines(self, seconds: float) -> None:
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            engine.pause(seconds)
            self._plan(index)

    def _update(self, version: int) -> float:
        """Send new weights to the engines; returns the seconds that it takes. It waits for engines that load weights."""
        self._version = version
        if self.schedule.rule == "finish":  # into host memory
            return self._stage()
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            limit = self.schedule.refresh_after
            old = limit is not None and engine.oldest_cache() <= version - limit
            engine.update(version, self.costs.weight_sync, refresh=self.schedule.rule == "refresh" or old)
            self._plan(index)
        return self.costs.weight_sync

    def _stage(self) -> float:
        seconds = max(0.0, *(end - self.now for end in self._loads.values()), 0.0) + self.costs.weight_sync
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            if index in self._loads:  # it stages once it has loaded
                engine.pause(seconds - (self._loads[index] - self.now))
            else:
                engine.pause(seconds)
                self._plan(index)
        return seconds

    def _sampled_length(self) -> float:
        """Return the mean length of all responses of admitted groups."""
        admitted = self.admission.state.admitted
        total = sum(sum(self.lengths.of(number)) for number in range(admitted))
        return total / (admitted * self.samples)
