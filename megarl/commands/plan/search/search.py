"""`plan --search`: the fastest layouts that fit, by estimated seconds; each of them is counted."""

from __future__ import annotations

import heapq
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.plan.count.rank_client import CannotCount, RankClient
from megarl.commands.plan.progress import Report, silent
from megarl.commands.plan.search.fits import NEAR, FitChecker, HostTooSmallError, Subject
from megarl.commands.plan.search.layouts import (
    RECOMPUTE,
    Choice,
    EngineLayout,
    apply_choice,
    choice_of,
    engine_layouts,
    layouts,
    overrides,
    sizes_of_micro_batches,
)
from megarl.commands.plan.search.needed import engines_that_hold
from megarl.errors import InputError
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import policy_config_of
from megarl.recipe.derived.offload import offloads
from megarl.recipe.schema import Recipe

_ESTIMATING = 0.25
"""Largest share of the time for estimates; layouts without an estimate count as not reached."""

_ENGINES = 5  # engine layouts that are counted
_PROCESSES = 2  # counting processes
_AT_A_TIME = 3  # layouts under examination: one may wait for the sample of another's forecast


@dataclass(frozen=True)
class FittingLayout:
    """A layout that was counted and fits."""

    choice: Choice
    seconds: float  # estimated
    peak: int  # bytes of the fullest rank


@dataclass
class SearchResult:
    """Outcome of a search. `best`: fastest first, all of different shape. Each of the `possible` choices is in `best` or in
    exactly one of the other counts."""

    possible: int = 0
    best: list[FittingLayout] = field(default_factory=list)
    too_large: int = 0  # by arithmetic
    unlikely: int = 0  # too large by forecast, not counted
    counted_too_large: int = 0
    hosts_too_small: int = 0  # counted: the devices suffice, the hosts do not
    host_refusal: str | None = None  # of the fastest of them
    refused: Counter[str] = field(default_factory=Counter)  # by error of a run
    slower: int = 0  # than a fitting layout of the same shape
    not_reached: int = 0  # within the time
    not_examined: int = 0  # since there were enough layouts
    seconds: float = 0.0
    not_counted: str | None = None  # unknown memory of the engines on the devices of `best`
    unchecked: list[str] = field(default_factory=list)  # what the preflight cannot check on this machine
    notes: list[str] = field(default_factory=list)  # of the preflight and of the device


@dataclass(frozen=True)
class _Family:
    """Choices of one layout and micro batch, fastest first. `above_forecast`: counted although the forecast is too large."""

    choices: tuple[Choice, ...]
    above_forecast: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.choices[0].layout.shape

    @property
    def rest(self) -> _Family:
        return _Family(self.choices[1:])


@dataclass(frozen=True)
class _Unlikely:
    """A forecast above the device's memory by `excess` bytes."""

    excess: float


_Verdict = int | str | _Unlikely | HostTooSmallError
"""Bytes of the fullest rank, or the error of a run, or a forecast that is too large, or hosts that are too small."""


def search(subject: Subject, *, seconds: float, count: int = 10, report: Report = silent) -> SearchResult:
    """Return the `count` fastest layouts that fit, or those counted within `seconds`. The recipe's layout is counted first,
    so it is among them if it fits. `report` receives the progress."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory, RankClient(_PROCESSES) as client:
        checker = FitChecker(subject, client, Path(directory), fastest_engines(subject), deadline)
        return _Search(subject, checker, deadline, count, report).run()


def examine(checker: FitChecker, choice: Choice, near: float | None) -> _Verdict:
    """Forecast and count a choice. A forecast above `near` times the device is a verdict; None: no forecast. Raises
    InputError if no layout of the model can be counted."""
    if near is not None and (excess := checker.excess(choice, near)):
        return _Unlikely(excess)
    refused = checker.refused(choice)
    if refused is not None:
        return refused
    try:
        return checker.peak(choice)
    except InputError:
        raise
    except HostTooSmallError as error:
        return error
    except ValueError as error:  # a rule of Megatron, checked while a rank is built
        return str(error)
    except CannotCount as error:
        return str(error).strip().splitlines()[-1]


def require_device(device: Device | None) -> Device:
    if device is None:
        raise InputError("--search needs a device: give --device, e.g. 910B or H100 (the recipe's head names none).")
    return device


def subject_of(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device, response: float | None = None
) -> Subject:
    critic = models.get("critic", models["rollout"]) if uses_critic(recipe.algorithm) else None
    return Subject(recipe, models["rollout"], critic, device, response)


def load_for_search(path: Path, settings: Sequence[str], model: str | None, device: Device) -> tuple[Recipe, Recipe]:
    """Return the recipe, even if its layout would be refused, and the recipe with a valid layout, to check the rest."""
    recipe = load_recipe(path, settings, check=False)
    other = with_first_layout(recipe, policy_config_of(recipe.model, path, model), device)
    load_recipe(path, [*settings, *overrides(recipe, other)])  # raises for every other fault
    return recipe, other


def with_first_layout(recipe: Recipe, model: dict[str, Any], device: Device) -> Recipe:
    """Return the recipe with the first layout that divides, and with its engines if they are valid."""
    choice = choice_of(recipe)
    layout = next(layouts(recipe, model, device.per_node), choice.layout)
    engines = next(engine_layouts(recipe, model, device.per_node), choice.engines)
    return apply_choice(recipe, replace(choice, layout=layout, engines=engines))


def fastest_engines(subject: Subject) -> list[EngineLayout]:
    """Return the fastest engine layouts by estimate that hold the weights; the trainers' layout does not matter. Raises
    InputError if there is none."""
    recipe, choice = subject.recipe, choice_of(subject.recipe)
    candidates = engines_that_hold(subject)
    choice = replace(choice, layout=next(layouts(recipe, subject.model, subject.device.per_node), choice.layout))
    candidates.sort(key=lambda engines: subject.step_seconds(apply_choice(recipe, replace(choice, engines=engines))))
    return candidates[:_ENGINES]


def families(subject: Subject) -> list[_Family]:
    """Return all candidates of a search, by layout and micro batch."""
    recipe, choice = subject.recipe, choice_of(subject.recipe)
    ways = [(recompute, offload) for recompute in RECOMPUTE for offload in _offloads(subject)]
    return [
        _Family(
            tuple(replace(choice, layout=layout, tokens=tokens, recompute=r, offload=offload) for r, offload in ways)
        )
        for layout in layouts(recipe, subject.model, subject.device.per_node)
        for tokens in sizes_of_micro_batches(recipe, layout)
    ]


def _offloads(subject: Subject) -> tuple[bool, ...]:
    """Return the offload settings to try: both if trainers and engines share devices."""
    recipe = subject.recipe
    shared = recipe.cluster.placement == "colocated" and recipe.train.source == "rollout"
    return (False, True) if shared else (offloads(recipe),)


class _Search:
    def __init__(
        self, subject: Subject, checker: FitChecker, deadline: float, count: int, report: Report = silent
    ) -> None:
        self._subject, self._checker = subject, checker
        self._deadline, self._count, self._report = deadline, count, report
        self._began = time.monotonic()
        self._queue: list[tuple[float, int, _Family]] = []
        self._unlikely: list[tuple[float, int, Choice]] = []
        self._pushed = 0
        self._counting: tuple[_Family, ...] = ()  # at the end of the search
        self._result = SearchResult()
        self._own = choice_of(subject.recipe)
        self._own_verdict: Future[_Verdict] | None = None  # None: before `run`

    def run(self) -> SearchResult:
        result = self._result
        workers = ThreadPoolExecutor(_AT_A_TIME)
        try:
            # The recipe's layout first: results are compared with it, and a recipe that fits is always in them.
            self._own_verdict = workers.submit(self._examine_own)
            self._estimate_all()
            self._report(f"estimated {self._result.possible:,} choices; counting the fastest that may fit")
            self._count_all(workers)
        finally:
            workers.shutdown(wait=False, cancel_futures=True)  # their requests end with the client
        if len(result.best) >= self._count:
            result.not_examined = self._left()
        else:
            result.not_reached += self._left()
        result.unlikely = len(self._unlikely)
        self._add_own()
        if result.best:
            result.not_counted = self._checker.not_counted
        result.best.sort(key=lambda fitting: fitting.seconds)
        result.seconds = time.monotonic() - self._began
        return result

    def _examine_own(self) -> _Verdict:
        refused = self._checker.refused(self._own)  # first: a layout that does not divide cannot be counted
        if refused is not None:
            return refused
        if self._checker.too_large(self._own):
            return _Unlikely(math.inf)
        return self._examine(_Family((self._own,), above_forecast=True))

    def _add_own(self) -> None:
        """Add the recipe's layout if it fits and the search did not reach it."""
        done, result = self._own_verdict, self._result
        if done is None or not done.done() or len(result.best) >= self._count or not result.not_reached:
            return
        verdict, shapes = done.result(), {fitting.choice.layout.shape for fitting in result.best}
        if isinstance(verdict, int) and verdict <= self._subject.limit and self._own.layout.shape not in shapes:
            result.not_reached -= 1
            self._fits(self._own, verdict)

    def _estimate_all(self) -> None:
        until = self._began + _ESTIMATING * (self._deadline - self._began)
        for family in families(self._subject):
            small = _Family(tuple(choice for choice in family.choices if not self._checker.too_large(choice)))
            self._result.possible += len(family.choices)
            self._result.too_large += len(family.choices) - len(small.choices)
            if time.monotonic() > until:
                self._result.not_reached += len(small.choices)
            else:
                self._push(small)

    def _push(self, family: _Family) -> None:
        """Queue a family by the estimate of its fastest choice."""
        if family.choices:
            self._pushed += 1  # breaks ties
            heapq.heappush(self._queue, (self._seconds(family.choices[0]), self._pushed, family))

    def _count_all(self, workers: ThreadPoolExecutor) -> None:
        """Count in the order of estimates, until enough layouts fit or the time is over."""
        running: dict[Future[_Verdict], _Family] = {}
        while len(self._result.best) < self._count and time.monotonic() < self._deadline:
            busy = {family.shape for family in running.values()}
            while len(running) < min(_AT_A_TIME, self._count - len(self._result.best)) and (family := self._next(busy)):
                running[workers.submit(self._verdict, family)] = family
                busy.add(family.shape)
            if not running:
                return
            left = max(0.0, self._deadline - time.monotonic())
            for future in wait(running, timeout=left, return_when=FIRST_COMPLETED).done:
                self._settle(running.pop(future), future.result())
                counted = len(self._result.best) + self._result.counted_too_large + self._result.hosts_too_small
                left = max(0.0, self._deadline - time.monotonic())
                self._report(f"counted {counted}, of which {len(self._result.best)} fit; at most {left:.0f} s left")
        self._counting = tuple(running.values())

    def _left(self) -> int:
        """Return the number of choices that are queued or were being counted at the end."""
        queued = sum(len(family.choices) for _, _, family in self._queue)
        return queued + sum(len(family.choices) for family in self._counting)

    def _next(self, busy: set[tuple[int, ...]]) -> _Family | None:
        """Return the fastest family that may fit, of a shape that is not being counted (`busy`)."""
        put_off = []
        chosen_family = None
        fitting = {entry.choice.layout.shape for entry in self._result.best}
        while self._queue and chosen_family is None and time.monotonic() < self._deadline:
            seconds, number, family = heapq.heappop(self._queue)
            if family.shape in fitting:
                self._result.slower += len(family.choices)
            elif family.shape in busy:
                put_off.append((seconds, number, family))
            elif not self._set_aside_by_forecast(family):
                chosen_family = family
        for item in put_off:
            heapq.heappush(self._queue, item)
        if chosen_family is None and not self._queue and time.monotonic() < self._deadline:
            return self._least_excess(fitting | busy)
        return chosen_family

    def _set_aside_by_forecast(self, family: _Family) -> bool:
        """Return True after setting the family aside, if an existing forecast says that it is too large."""
        choice = family.choices[0]
        excess = self._checker.excess(choice) if self._checker.is_forecast(choice) else 0.0
        if excess:
            self._settle(family, _Unlikely(excess))
        return bool(excess)

    def _least_excess(self, left_out: set[tuple[int, ...]]) -> _Family | None:
        """Return the choice with the smallest excess by forecast, without these shapes."""
        remaining = [item for item in self._unlikely if item[-1].layout.shape not in left_out]
        if not remaining:
            return None
        self._unlikely.remove(min(remaining))
        return _Family((min(remaining)[-1],), above_forecast=True)

    def _verdict(self, family: _Family) -> _Verdict:
        if family.choices[0] == self._own and self._own_verdict is not None:
            return self._own_verdict.result()
        return self._examine(family)

    def _examine(self, family: _Family) -> _Verdict:
        return examine(self._checker, family.choices[0], near=None if family.above_forecast else NEAR)

    def _settle(self, family: _Family, verdict: _Verdict) -> None:
        choice = family.choices[0]
        if isinstance(verdict, int) and verdict <= self._subject.limit:
            self._fits(choice, verdict)
            self._result.slower += len(family.rest.choices)
            return
        if isinstance(verdict, _Unlikely):
            self._pushed += 1
            self._unlikely.append((verdict.excess, self._pushed, choice))
        elif isinstance(verdict, str):
            self._result.refused[verdict] += 1
        elif isinstance(verdict, HostTooSmallError):
            self._result.hosts_too_small += 1
            self._result.host_refusal = self._result.host_refusal or str(verdict)
        else:
            self._result.counted_too_large += 1
        self._push(family.rest)

    def _fits(self, choice: Choice, peak: int) -> None:
        choice = replace(choice, engines=self._checker.engines)
        self._result.best.append(FittingLayout(choice, self._seconds(choice), peak))

    def _seconds(self, choice: Choice) -> float:
        return self._subject.step_seconds(apply_choice(self._subject.recipe, choice))
