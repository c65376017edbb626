"""`plan --search`: the fastest layouts that fit, by estimated seconds, each of them counted."""

from __future__ import annotations

import heapq
import math
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.commands.plan.count.rank_client import CannotCount, RankClient
from megarl.commands.plan.search.fits import HostTooSmallError, Judge, Subject
from megarl.commands.plan.search.layouts import (
    RECOMPUTE,
    Choice,
    Engines,
    choice_of,
    chosen,
    engine_layouts,
    layouts,
    sizes_of_micro_batches,
)
from megarl.commands.plan.search.step_time import Clock
from megarl.errors import InputError
from megarl.recipe.offload import offloads

_ESTIMATING = 0.25
"""Share of the time that goes into estimates at most; layouts that are left without one are not reached."""

_ENGINES = 5  # ways to lay them out that are counted
_PROCESSES = 2  # that count
_AT_A_TIME = 3  # layouts that are looked at: one of them may wait for what another is forecast from


@dataclass(frozen=True)
class Fitting:
    """A layout that was counted, and fits."""

    choice: Choice
    seconds: float  # estimated
    peak: int  # bytes of the rank that needs the most


@dataclass
class Found:
    """`best`: the fastest first, no two of the same shape. Each of the `possible` choices is in exactly one of the other
    numbers, or in `best`."""

    possible: int = 0
    best: list[Fitting] = field(default_factory=list)
    too_large: int = 0  # by arithmetic
    unlikely: int = 0  # by forecast, and not counted
    counted_too_large: int = 0
    hosts_too_small: int = 0  # counted, and fitting the devices, whose hosts have too little memory
    host_refusal: str | None = None  # why, of the fastest of them
    refused: Counter[str] = field(default_factory=Counter)  # by what a run would say
    slower: int = 0  # than another of the same shape that fits
    not_reached: int = 0
    seconds: float = 0.0
    not_counted: str | None = None  # of the engines, what `best` lies beside


@dataclass(frozen=True)
class _Family:
    """Choices of one layout and micro batch, the fastest first. `doubted`: forecast to be too large, and counted yet."""

    choices: tuple[Choice, ...]
    doubted: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.choices[0].layout.shape

    @property
    def others(self) -> _Family:
        return _Family(self.choices[1:])


@dataclass(frozen=True)
class _Unlikely:
    """What is forecast to be too large: `excess` bytes."""

    excess: float


_Verdict = int | str | _Unlikely | HostTooSmallError
"""Bytes of the rank that needs the most, or why a run would refuse it, or that it is not worth counting now, or that its
hosts have too little memory."""


def search(subject: Subject, *, seconds: float, wanted: int = 10) -> Found:
    """The `wanted` fastest layouts that fit, or those that were found within `seconds`; the recipe's own among these,
    where it fits, whatever else is found."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory, RankClient(_PROCESSES) as client:
        clock = Clock(subject.device, subject.shape, subject.critic_shape, subject.response)
        judge = Judge(subject, client, Path(directory), fastest_engines(subject, clock), deadline)
        return _Search(subject, judge, clock, deadline, wanted).run()


def fastest_engines(subject: Subject, clock: Clock) -> list[Engines]:
    """By their estimates, whatever the trainers' layout."""
    recipe, own = subject.recipe, choice_of(subject.recipe)
    found = list(engine_layouts(recipe, subject.model, subject.device.per_node))
    own = replace(own, layout=next(layouts(recipe, subject.model, subject.device.per_node), own.layout))
    found.sort(key=lambda engines: clock.seconds(chosen(recipe, replace(own, engines=engines))))
    return found[:_ENGINES]


def families(subject: Subject) -> list[_Family]:
    """All that a search chooses from."""
    recipe, own = subject.recipe, choice_of(subject.recipe)
    ways = [(recompute, offload) for recompute in RECOMPUTE for offload in _offloads(subject)]
    return [
        _Family(tuple(replace(own, layout=layout, tokens=tokens, recompute=r, offload=offload) for r, offload in ways))
        for layout in layouts(recipe, subject.model, subject.device.per_node)
        for tokens in sizes_of_micro_batches(recipe, layout)
    ]


def _offloads(subject: Subject) -> tuple[bool, ...]:
    """Trainers may leave the device to engines where these share it with them."""
    recipe = subject.recipe
    shared = recipe.cluster.placement == "colocated" and recipe.train.source == "rollout"
    return (False, True) if shared else (offloads(recipe),)


class _Search:
    def __init__(self, subject: Subject, judge: Judge, clock: Clock, deadline: float, wanted: int) -> None:
        self._subject, self._judge, self._clock = subject, judge, clock
        self._deadline, self._wanted = deadline, wanted
        self._began = time.monotonic()
        self._queue: list[tuple[float, int, _Family]] = []
        self._unlikely: list[tuple[float, int, Choice]] = []
        self._pushed = 0
        self._found = Found()
        self._own = choice_of(subject.recipe)
        self._verdict_of_own: Future[_Verdict] | None = None  # None: before `run`

    def run(self) -> Found:
        found = self._found
        workers = ThreadPoolExecutor(_AT_A_TIME)
        try:
            self._count_own(workers)
            self._estimate_all()
            self._count_all(workers)
        finally:
            workers.shutdown(wait=False, cancel_futures=True)  # what they wait for ends with the asker
        found.not_reached += sum(len(family.choices) for _, _, family in self._queue)
        found.unlikely = len(self._unlikely)
        self._add_own()
        if found.best:
            found.not_counted = self._judge.not_counted
        found.best.sort(key=lambda one: one.seconds)
        found.seconds = time.monotonic() - self._began
        return found

    def _count_own(self, workers: ThreadPoolExecutor) -> None:
        """Before all others: what is found is compared with it, and a recipe that fits is never told that nothing does."""
        self._verdict_of_own = workers.submit(self._judged_own)

    def _judged_own(self) -> _Verdict:
        refused = self._judge.refused(self._own)  # first of all: nothing can be said of what does not divide
        if refused is not None:
            return refused
        if self._judge.too_large(self._own):
            return _Unlikely(math.inf)
        return self._judged(_Family((self._own,), doubted=True))

    def _add_own(self) -> None:
        """To what was found before the time was over; where it was, the recipe's own was not reached among others."""
        done, found = self._verdict_of_own, self._found
        if done is None or not done.done() or len(found.best) >= self._wanted or not found.not_reached:
            return
        verdict, shapes = done.result(), {one.choice.layout.shape for one in found.best}
        if isinstance(verdict, int) and verdict <= self._subject.limit and self._own.layout.shape not in shapes:
            found.not_reached -= 1
            self._fits(self._own, verdict)

    def _estimate_all(self) -> None:
        until = self._began + _ESTIMATING * (self._deadline - self._began)
        for family in families(self._subject):
            small = _Family(tuple(choice for choice in family.choices if not self._judge.too_large(choice)))
            self._found.possible += len(family.choices)
            self._found.too_large += len(family.choices) - len(small.choices)
            if time.monotonic() > until:
                self._found.not_reached += len(small.choices)
            else:
                self._push(small)

    def _push(self, family: _Family) -> None:
        """With the estimate of its fastest choice."""
        if family.choices:
            self._pushed += 1  # decides between equally fast ones
            heapq.heappush(self._queue, (self._seconds(family.choices[0]), self._pushed, family))

    def _count_all(self, workers: ThreadPoolExecutor) -> None:
        """In the order of estimates, until enough fit or the time is over."""
        running: dict[Future[_Verdict], _Family] = {}
        while len(self._found.best) < self._wanted and time.monotonic() < self._deadline:
            busy = {family.shape for family in running.values()}
            while len(running) < min(_AT_A_TIME, self._wanted - len(self._found.best)) and (taken := self._next(busy)):
                running[workers.submit(self._verdict, taken)] = taken
                busy.add(taken.shape)
            if not running:
                return
            left = max(0.0, self._deadline - time.monotonic())
            for future in wait(running, timeout=left, return_when=FIRST_COMPLETED).done:
                self._settle(running.pop(future), future.result())
        self._found.not_reached += sum(len(family.choices) for family in running.values())

    def _next(self, busy: set[tuple[int, ...]]) -> _Family | None:
        """The fastest that may fit, of a shape that is not `busy` being counted."""
        put_off = []
        taken = None
        fitting = {one.choice.layout.shape for one in self._found.best}
        while self._queue and taken is None and time.monotonic() < self._deadline:
            seconds, number, family = heapq.heappop(self._queue)
            if family.shape in fitting:
                self._found.slower += len(family.choices)
            elif family.shape in busy:
                put_off.append((seconds, number, family))
            elif not self._doubts(family):
                taken = family
        for item in put_off:
            heapq.heappush(self._queue, item)
        if taken is None and not self._queue and time.monotonic() < self._deadline:
            return self._doubted(fitting | busy)
        return taken

    def _doubts(self, family: _Family) -> bool:
        """Whether it is put off at once, by a forecast that there is already."""
        choice = family.choices[0]
        excess = self._judge.excess(choice) if self._judge.is_forecast(choice) else 0.0
        if excess:
            self._settle(family, _Unlikely(excess))
        return bool(excess)

    def _doubted(self, left_out: set[tuple[int, ...]]) -> _Family | None:
        """What is the least too large by its forecast, but for those shapes."""
        others = [item for item in self._unlikely if item[-1].layout.shape not in left_out]
        if not others:
            return None
        self._unlikely.remove(min(others))
        return _Family((min(others)[-1],), doubted=True)

    def _verdict(self, family: _Family) -> _Verdict:
        if family.choices[0] == self._own and self._verdict_of_own is not None:
            return self._verdict_of_own.result()
        return self._judged(family)

    def _judged(self, family: _Family) -> _Verdict:
        choice = family.choices[0]
        if not family.doubted and (excess := self._judge.excess(choice)):
            return _Unlikely(excess)
        refused = self._judge.refused(choice)
        if refused is not None:
            return refused
        try:
            return self._judge.peak(choice)
        except InputError:
            raise  # of every layout of the model
        except HostTooSmallError as error:
            return error
        except ValueError as error:  # Megatron's own rules, asked as a rank is built
            return str(error)
        except CannotCount as error:
            return str(error).strip().splitlines()[-1]

    def _settle(self, family: _Family, verdict: _Verdict) -> None:
        choice = family.choices[0]
        if isinstance(verdict, _Unlikely):
            self._pushed += 1
            self._unlikely.append((verdict.excess, self._pushed, choice))
            self._push(family.others)
        elif isinstance(verdict, str):
            self._found.refused[verdict] += 1
            self._push(family.others)
        elif isinstance(verdict, HostTooSmallError):
            self._found.hosts_too_small += 1
            self._found.host_refusal = self._found.host_refusal or str(verdict)
            self._push(family.others)
        elif verdict > self._subject.limit:
            self._found.counted_too_large += 1
            self._push(family.others)
        else:
            self._fits(choice, verdict)
            self._found.slower += len(family.others.choices)

    def _fits(self, choice: Choice, peak: int) -> None:
        choice = replace(choice, engines=self._judge.engines)
        self._found.best.append(Fitting(choice, self._seconds(choice), peak))

    def _seconds(self, choice: Choice) -> float:
        return self._clock.seconds(chosen(self._subject.recipe, choice))
