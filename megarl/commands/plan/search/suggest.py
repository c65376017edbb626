"""Suggestions for a recipe that does not fit or does not divide: layouts that do, with the fewest changes."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from megarl.commands.plan.count.rank_client import CannotCount, RankClient
from megarl.commands.plan.count.types import Proposal
from megarl.commands.plan.search.fits import Chosen, FitChecker, HostTooSmallError, Subject, too_large
from megarl.commands.plan.search.forecast import setting
from megarl.commands.plan.search.layouts import (
    Choice,
    EngineLayout,
    choice_of,
    chosen,
    engine_layouts,
    overrides,
    refusal,
)
from megarl.commands.plan.search.search import families, fastest_engines
from megarl.commands.plan.search.step_time import StepTimes
from megarl.errors import InputError

_COUNT = 3
_AT_A_TIME = 2  # layouts under examination
_FITS = 0.99  # of the device: larger forecasts are not counted here, since forecasts are off by some thousandths
_EXAMINED = 500  # choices that `uncounted_layouts` examines

_flat = attrgetter(
    "layout.tensor_parallel",
    "layout.pipeline_parallel",
    "layout.context_parallel",
    "layout.expert_parallel",
    "layout.expert_tensor_parallel",
    "layout.virtual_pipeline",
    "layout.first_stage_layers",
    "layout.last_stage_layers",
    "recompute",
    "offload",
    "tokens",
)


class Suggestions(NamedTuple):
    """`proposals`: fastest first, by estimate. `stopped`: the time was over before there were enough."""

    proposals: list[Proposal]
    stopped: bool


def proposals(subject: Subject, client: RankClient, *, engines: Chosen | None = None, seconds: float) -> Suggestions:
    """Return up to `_COUNT` layouts that fit, each counted, within `seconds`.

    Sorted by number of changed keys, then by cost of the forecast, then by step time. `engines`: None: choose them.
    """
    deadline, clock = time.monotonic() + seconds, _clock(subject)
    with tempfile.TemporaryDirectory() as directory:
        ways = [_own_engines(subject), *fastest_engines(subject, clock)] if engines is None else []
        checker = FitChecker(subject, client, Path(directory), list(dict.fromkeys(ways)), deadline, engines)
        look = _Look(subject, checker, clock, deadline)
        workers = ThreadPoolExecutor(_AT_A_TIME)
        looking = {workers.submit(look.run) for _ in range(_AT_A_TIME)}
        workers.shutdown(wait=False)  # requests in flight end with the client
        while looking and len(look.found()) < _COUNT and (left := deadline - time.monotonic()) > 0:
            done, looking = wait(looking, timeout=left, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        found_layouts = look.found()
        return Suggestions(found_layouts, stopped=len(found_layouts) < _COUNT and bool(looking or not look.over))


class _Look:
    """Search for layouts that fit, shared by several threads."""

    def __init__(self, subject: Subject, checker: FitChecker, clock: StepTimes, deadline: float) -> None:
        self._subject, self._checker, self._clock, self._deadline = subject, checker, clock, deadline
        self._own = _flat(choice_of(subject.recipe))
        self._nearest = _by_changes(subject, checker.too_large, clock)
        self._found: list[tuple[Choice, Proposal]] = []
        self._counting: set[Choice] = set()
        self._lock, self.over = threading.Lock(), False  # over: no candidate is left

    def run(self) -> None:
        while (choice := self._next()) is not None:
            fits = _fits(self._checker, choice, self._subject.limit)
            with self._lock:
                self._counting.remove(_without_layers(choice))
                if fits and not self._is_idle(choice):
                    recipe = self._checker.made(self._subject.recipe, choice)
                    line = " ".join(overrides(self._subject.recipe, recipe))
                    times = self._times(choice)
                    # An earlier candidate may have been counted later.
                    kept = [entry for entry in self._found if not self._is_no_better(entry[0], choice, times)]
                    self._found = [*kept, (choice, Proposal(line, times))]

    def found(self) -> list[Proposal]:
        with self._lock:
            return sorted((proposal for _, proposal in self._found[:_COUNT]), key=lambda proposal: proposal.times)

    def _next(self) -> Choice | None:
        """Return the next candidate; None: no more."""
        with self._lock:
            while len(self._found) < _COUNT and time.monotonic() < self._deadline:
                choice = next(self._nearest, None)
                if choice is None:
                    self.over = True
                    return None
                if not self._is_idle(choice) and _without_layers(choice) not in self._counting:
                    self._counting.add(_without_layers(choice))
                    return choice
        return None

    def _is_idle(self, choice: Choice) -> bool:
        """Return True if an earlier find is as good."""
        return any(self._is_no_better(choice, other, proposal.times) for other, proposal in self._found)

    def _is_no_better(self, choice: Choice, other: Choice, times: float) -> bool:
        """Return True if `other`, which takes `times` the recipe's step time, is as good as `choice`.

        `other` differs only in the layers of stages; or it is at least as fast, and changes the same keys, or a subset of the changes.
        """
        if _without_layers(other) == _without_layers(choice):
            return True
        changed, before = self._changes(choice), self._changes(other)
        comparable = before.keys() == changed.keys() or before.items() <= changed.items()
        return comparable and times <= self._times(choice)

    def _changes(self, choice: Choice) -> dict[int, Any]:
        pairs = zip(_flat(choice), self._own, strict=True)
        return {key: value for key, (value, current) in enumerate(pairs) if value != current}

    def _times(self, choice: Choice) -> float:
        recipe = self._subject.recipe
        return self._clock.seconds(self._checker.made(recipe, choice)) / self._clock.seconds(recipe)


def _without_layers(choice: Choice) -> Choice:
    layout = replace(choice.layout, virtual_pipeline=None, first_stage_layers=None, last_stage_layers=None)
    return replace(choice, layout=layout)


def uncounted_layouts(subject: Subject) -> list[str]:
    """Return command lines of layouts like `proposals`, by arithmetic alone, within a second or two.

    No check of a run refuses them, and their lower bound fits the device. Whether they fit is known only after counting.
    """
    recipe, lines = subject.recipe, dict[tuple[int, ...], str]()
    engines = _own_engines(subject)
    near = _by_changes(subject, lambda choice: too_large(subject, choice), _clock(subject))
    for choice in islice(near, _EXAMINED):
        candidate = chosen(recipe, replace(choice, engines=engines))
        if choice.layout.shape not in lines and refusal(candidate, subject.model) is None:
            lines[choice.layout.shape] = " ".join(overrides(recipe, candidate))
        if len(lines) == _COUNT:
            break
    return list(lines.values())


def _clock(subject: Subject) -> StepTimes:
    return StepTimes(subject.device, subject.shape, subject.critic_shape, subject.response)


def _own_engines(subject: Subject) -> EngineLayout:
    """Return the recipe's engines, or the first valid ones if they are invalid."""
    current = choice_of(subject.recipe).engines
    return next(engine_layouts(subject.recipe, subject.model, subject.device.per_node), current)


def _by_changes(subject: Subject, too_large: Callable[[Choice], bool], clock: StepTimes) -> Iterator[Choice]:
    current = _flat(choice_of(subject.recipe))

    interleaving = (None, subject.recipe.megatron.virtual_pipeline)  # others take more memory and long to count

    def changes(choice: Choice) -> int:
        return sum(value != before for value, before in zip(_flat(choice), current, strict=True))

    every = sorted((choice for family in families(subject) for choice in family.choices), key=changes)
    for number, group in groupby(every, key=changes):
        near = (choice for choice in group if number and choice.layout.virtual_pipeline in interleaving)
        may_fit = [choice for choice in near if not too_large(choice)]
        # First the choices with the recipe's forecast setting: each other setting is counted first, which takes seconds.
        laid_out = [(choice, chosen(subject.recipe, choice)) for choice in may_fit]
        laid_out.sort(key=lambda entry: (setting(entry[1]) != setting(subject.recipe), clock.seconds(entry[1])))
        yield from (choice for choice, _ in laid_out)


def _fits(checker: FitChecker, choice: Choice, limit: float) -> bool:
    if checker.excess(choice, near=_FITS) or checker.refused(choice):
        return False
    try:
        return checker.peak(choice) <= limit
    except InputError:
        raise  # applies to every layout of the model
    except (ValueError, CannotCount, HostTooSmallError):  # refused by Megatron, or hosts are too small
        return False
