"""What to propose for a recipe that does not fit, or does not divide: the layouts that do, with the fewest changes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

from megarl.config.errors import InputError
from megarl.planner.ask import Asker, CannotCount
from megarl.planner.clock import Clock
from megarl.planner.judge import Chosen, Judge, Subject, too_large
from megarl.planner.layouts import Choice, Engines, choice_of, chosen, engine_layouts, overrides, refusal
from megarl.planner.search import families, fastest_engines

_WANTED = 3
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


def proposals(subject: Subject, *, engines: Chosen | None = None, seconds: float = 20.0) -> list[str]:
    """Command lines of layouts that fit, each counted: the fewest changes first, of equally many the fastest. As many as
    `seconds` allow, `_WANTED` at most, no two of which differ in the layers of their stages alone. `engines`: None: to
    be chosen."""
    deadline, recipe = time.monotonic() + seconds, subject.recipe
    clock = _clock(subject)
    found: dict[tuple[int, ...], str] = {}

    def look(judge: Judge) -> None:
        for choice in _by_changes(subject, judge.too_large, clock):
            if len(found) == _WANTED or time.monotonic() > deadline:
                return
            if choice.layout.shape not in found and _fits(judge, choice, subject.limit):
                found[choice.layout.shape] = " ".join(overrides(recipe, judge.made(recipe, choice)))

    with tempfile.TemporaryDirectory() as directory, Asker() as asker:
        ways = [_own_engines(subject), *fastest_engines(subject, clock)] if engines is None else []
        judge = Judge(subject, asker, Path(directory), list(dict.fromkeys(ways)), deadline, engines)
        worker = ThreadPoolExecutor(1)
        looking = worker.submit(look, judge)
        worker.shutdown(wait=False)  # what is being counted when the time is over ends with the asker
        if looking in wait([looking], timeout=deadline - time.monotonic()).done:
            looking.result()
        return list(found.values())


def untried(subject: Subject) -> list[str]:
    """As `proposals`, by arithmetic alone, in a second or two: no check of a run refuses them, and no rank needs more at
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

    def changes(choice: Choice) -> int:
        return sum(one != other for one, other in zip(_flat(choice), own, strict=True))

    every = sorted((choice for family in families(subject) for choice in family.choices), key=changes)
    for number, alike in groupby(every, key=changes):
        may_fit = [choice for choice in alike if number and not too_large(choice)]
        yield from sorted(may_fit, key=lambda choice: clock.seconds(chosen(subject.recipe, choice)))


def _fits(judge: Judge, choice: Choice, limit: float) -> bool:
    if judge.excess(choice) or judge.refused(choice):
        return False
    try:
        return judge.peak(choice) <= limit
    except InputError:
        raise  # of every layout of the model
    except (ValueError, CannotCount):  # what Megatron refuses as it is built
        return False
