"""What to propose for a recipe that does not fit, or does not divide: the layouts that do, with the fewest changes."""

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
from megarl.commands.plan.search.fits import Chosen, HostTooSmallError, Judge, Subject, too_large
from megarl.commands.plan.search.forecast import setting
from megarl.commands.plan.search.layouts import Choice, Engines, choice_of, chosen, engine_layouts, overrides, refusal
from megarl.commands.plan.search.search import families, fastest_engines
from megarl.commands.plan.search.step_time import Clock
from megarl.errors import InputError

_WANTED = 3
_AT_A_TIME = 2  # layouts that are looked at
_FITS = 0.99  # of a device: what is forecast to need more is not counted here, since forecasts are some thousandths off
_LOOKED_AT = 500  # choices, of which arithmetic finds those that are not refused

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


class Nearest(NamedTuple):
    """`found`: the fastest first, by their estimates. `stopped`: the time was over before there were enough."""

    found: list[Proposal]
    stopped: bool


def proposals(subject: Subject, client: RankClient, *, engines: Chosen | None = None, seconds: float) -> Nearest:
    """Layouts that fit, each counted: the fewest changes first, of equally many those that are told soonest, the fastest.
    As many as `seconds` allow, `_WANTED` at most. `engines`: None: to be chosen."""
    deadline, clock = time.monotonic() + seconds, _clock(subject)
    with tempfile.TemporaryDirectory() as directory:
        ways = [_own_engines(subject), *fastest_engines(subject, clock)] if engines is None else []
        judge = Judge(subject, client, Path(directory), list(dict.fromkeys(ways)), deadline, engines)
        look = _Look(subject, judge, clock, deadline)
        workers = ThreadPoolExecutor(_AT_A_TIME)
        looking = {workers.submit(look.run) for _ in range(_AT_A_TIME)}
        workers.shutdown(wait=False)  # what is still being counted in the end ends with the asker
        while looking and len(look.found()) < _WANTED and (left := deadline - time.monotonic()) > 0:
            done, looking = wait(looking, timeout=left, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
        found = look.found()
        return Nearest(found, stopped=len(found) < _WANTED and bool(looking or not look.over))


class _Look:
    """For layouts that fit, by several threads."""

    def __init__(self, subject: Subject, judge: Judge, clock: Clock, deadline: float) -> None:
        self._subject, self._judge, self._clock, self._deadline = subject, judge, clock, deadline
        self._own = _flat(choice_of(subject.recipe))
        self._nearest = _by_changes(subject, judge.too_large, clock)
        self._found: list[tuple[Choice, Proposal]] = []
        self._counting: set[Choice] = set()
        self._lock, self.over = threading.Lock(), False  # over: nothing is left to look at

    def run(self) -> None:
        while (choice := self._next()) is not None:
            fits = _fits(self._judge, choice, self._subject.limit)
            with self._lock:
                self._counting.remove(_without_layers(choice))
                if fits and not self._is_idle(choice):
                    made = self._judge.made(self._subject.recipe, choice)
                    line = " ".join(overrides(self._subject.recipe, made))
                    times = self._times(choice)
                    # What was looked at later may have been counted sooner.
                    kept = [one for one in self._found if not self._is_no_better(one[0], choice, times)]
                    self._found = [*kept, (choice, Proposal(line, times))]

    def found(self) -> list[Proposal]:
        with self._lock:
            return sorted((one for _, one in self._found[:_WANTED]), key=lambda one: one.times)

    def _next(self) -> Choice | None:
        """What is to be looked at; None: nothing more."""
        with self._lock:
            while len(self._found) < _WANTED and time.monotonic() < self._deadline:
                choice = next(self._nearest, None)
                if choice is None:
                    self.over = True
                    return None
                if not self._is_idle(choice) and _without_layers(choice) not in self._counting:
                    self._counting.add(_without_layers(choice))
                    return choice
        return None

    def _is_idle(self, choice: Choice) -> bool:
        """Whether one that was found is as good."""
        return any(self._is_no_better(choice, other, proposal.times) for other, proposal in self._found)

    def _is_no_better(self, choice: Choice, other: Choice, times: float) -> bool:
        """Whether `other`, which takes `times` as long as the recipe, is as good as `choice`: it differs in the layers of stages
        alone; or it is no slower, and changes the same keys, or some of the same and nothing else."""
        if _without_layers(other) == _without_layers(choice):
            return True
        changed, before = self._changes(choice), self._changes(other)
        alike = before.keys() == changed.keys() or before.items() <= changed.items()
        return alike and times <= self._times(choice)

    def _changes(self, choice: Choice) -> dict[int, Any]:
        pairs = zip(_flat(choice), self._own, strict=True)
        return {key: value for key, (value, own) in enumerate(pairs) if value != own}

    def _times(self, choice: Choice) -> float:
        recipe = self._subject.recipe
        return self._clock.seconds(self._judge.made(recipe, choice)) / self._clock.seconds(recipe)


def _without_layers(choice: Choice) -> Choice:
    layout = replace(choice.layout, virtual_pipeline=None, first_stage_layers=None, last_stage_layers=None)
    return replace(choice, layout=layout)


def untried(subject: Subject) -> list[str]:
    """Command lines of layouts, as `proposals`, by arithmetic alone, in a second or two: no check of a run refuses them, and no rank needs more at
    least than a device has. Whether they fit is not known before they are counted."""
    recipe, found = subject.recipe, dict[tuple[int, ...], str]()
    engines = _own_engines(subject)
    near = _by_changes(subject, lambda choice: too_large(subject, choice), _clock(subject))
    for choice in islice(near, _LOOKED_AT):
        made = chosen(recipe, replace(choice, engines=engines))
        if choice.layout.shape not in found and refusal(made, subject.model) is None:
            found[choice.layout.shape] = " ".join(overrides(recipe, made))
        if len(found) == _WANTED:
            break
    return list(found.values())


def _clock(subject: Subject) -> Clock:
    return Clock(subject.device, subject.shape, subject.critic_shape, subject.response)


def _own_engines(subject: Subject) -> Engines:
    """The recipe's; where there cannot be such, the first that there can be."""
    own = choice_of(subject.recipe).engines
    return next(engine_layouts(subject.recipe, subject.model, subject.device.per_node), own)


def _by_changes(subject: Subject, too_large: Callable[[Choice], bool], clock: Clock) -> Iterator[Choice]:
    own = _flat(choice_of(subject.recipe))

    interleaving = (None, subject.recipe.megatron.virtual_pipeline)  # another one takes more memory, and long to count

    def changes(choice: Choice) -> int:
        return sum(one != other for one, other in zip(_flat(choice), own, strict=True))

    every = sorted((choice for family in families(subject) for choice in family.choices), key=changes)
    for number, alike in groupby(every, key=changes):
        near = (choice for choice in alike if number and choice.layout.virtual_pipeline in interleaving)
        may_fit = [choice for choice in near if not too_large(choice)]
        # First those that are forecast from what the recipe's own is: each other setting is counted first, for seconds.
        laid_out = [(choice, chosen(subject.recipe, choice)) for choice in may_fit]
        laid_out.sort(key=lambda one: (setting(one[1]) != setting(subject.recipe), clock.seconds(one[1])))
        yield from (choice for choice, _ in laid_out)


def _fits(judge: Judge, choice: Choice, limit: float) -> bool:
    if judge.excess(choice, near=_FITS) or judge.refused(choice):
        return False
    try:
        return judge.peak(choice) <= limit
    except InputError:
        raise  # of every layout of the model
    except (
        ValueError,
        CannotCount,
        HostTooSmallError,
    ):  # what Megatron refuses as it is built, and what hosts do not hold
        return False
