"""Suggestions for a recipe that does not fit or does not divide: layouts that do, with the fewest changes."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from megarl.commands.plan.count.rank_client import RankClient
from megarl.commands.plan.count.types import Suggestion
from megarl.commands.plan.search.fits import EngineChoice, FitChecker, Subject, too_large
from megarl.commands.plan.search.forecast import setting
from megarl.commands.plan.search.layouts import (
    Choice,
    apply_choice,
    choice_of,
    overrides,
    refusal,
)
from megarl.commands.plan.search.needed import nearest_engines, shortage
from megarl.commands.plan.search.search import examine, families, fastest_engines, subject_of, with_first_layout
from megarl.errors import InputError, RecipeError
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import policy_config_of

_COUNT = 3
_AT_A_TIME = 2  # layouts under examination
_FITS = 0.99  # of the device: larger forecasts are not counted here, since forecasts are off by some thousandths
_EXAMINED = 500  # choices that `uncounted_layouts` examines


class Suggestions(NamedTuple):
    """`suggestions`: fastest first, by estimate. `stopped`: the time was over before there were enough."""

    suggestions: list[Suggestion]
    stopped: bool


def suggest(
    subject: Subject, client: RankClient, *, engines: EngineChoice | None = None, seconds: float
) -> Suggestions:
    """Return up to `_COUNT` layouts that fit, each counted, within `seconds`.

    Sorted by number of changed keys, then by cost of the forecast, then by step time. `engines`: None: choose them.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        ways = [nearest_engines(subject), *fastest_engines(subject)] if engines is None else []
        checker = FitChecker(subject, client, Path(directory), list(dict.fromkeys(ways)), deadline, engines)
        search = _SuggestionSearch(subject, checker, deadline)
        workers = ThreadPoolExecutor(_AT_A_TIME)
        running = {workers.submit(search.run) for _ in range(_AT_A_TIME)}
        workers.shutdown(wait=False)  # requests in flight end with the client
        while running and len(search.suggestions()) < _COUNT and (left := deadline - time.monotonic()) > 0:
            done, running = wait(running, timeout=left, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        suggestions = search.suggestions()
        return Suggestions(suggestions, stopped=len(suggestions) < _COUNT and bool(running or not search.over))


class _SuggestionSearch:
    """Search for layouts that fit, shared by several threads."""

    def __init__(self, subject: Subject, checker: FitChecker, deadline: float) -> None:
        self._subject, self._checker, self._deadline = subject, checker, deadline
        self._own = _settings(choice_of(subject.recipe))
        self._nearest = _by_changes(subject, checker.too_large)
        self._suggestions: list[tuple[Choice, Suggestion]] = []
        self._counting: set[Choice] = set()
        self._lock, self.over = threading.Lock(), False  # over: no candidate is left

    def run(self) -> None:
        while (choice := self._next()) is not None:
            verdict = examine(self._checker, choice, near=_FITS)
            fits = isinstance(verdict, int) and verdict <= self._subject.limit
            with self._lock:
                self._counting.remove(_without_layers(choice))
                if fits and not self._is_dominated(choice):
                    recipe = self._checker.with_chosen_engines(self._subject.recipe, choice)
                    line = " ".join(overrides(self._subject.recipe, recipe))
                    times = self._times(choice)
                    # An earlier candidate may have been counted later.
                    kept = [entry for entry in self._suggestions if not self._is_no_better(entry[0], choice, times)]
                    self._suggestions = [*kept, (choice, Suggestion(line, times))]

    def suggestions(self) -> list[Suggestion]:
        with self._lock:
            return sorted(
                (suggestion for _, suggestion in self._suggestions[:_COUNT]), key=lambda suggestion: suggestion.times
            )

    def _next(self) -> Choice | None:
        """Return the next candidate; None: no more."""
        with self._lock:
            while len(self._suggestions) < _COUNT and time.monotonic() < self._deadline:
                choice = next(self._nearest, None)
                if choice is None:
                    self.over = True
                    return None
                if not self._is_dominated(choice) and _without_layers(choice) not in self._counting:
                    self._counting.add(_without_layers(choice))
                    return choice
        return None

    def _is_dominated(self, choice: Choice) -> bool:
        """Return True if an earlier suggestion is as good."""
        return any(self._is_no_better(choice, other, suggestion.times) for other, suggestion in self._suggestions)

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
        pairs = zip(_settings(choice), self._own, strict=True)
        return {key: value for key, (value, current) in enumerate(pairs) if value != current}

    def _times(self, choice: Choice) -> float:
        recipe = self._subject.recipe
        seconds = self._subject.step_seconds
        return seconds(self._checker.with_chosen_engines(recipe, choice)) / seconds(recipe)


def _settings(choice: Choice) -> tuple[Any, ...]:
    """Return the settings of a choice, without its engines."""
    return (*vars(choice.layout).values(), choice.recompute, choice.offload, choice.tokens)


def _without_layers(choice: Choice) -> Choice:
    layout = replace(choice.layout, virtual_pipeline=None, first_stage_layers=None, last_stage_layers=None)
    return replace(choice, layout=layout)


def uncounted_layouts(subject: Subject) -> list[str]:
    """Return command lines of layouts like `suggest`, by arithmetic alone, within a second or two.

    No check of a run refuses them, their lower bound fits the device, and their engines hold the weights. Whether they fit is
    known only after counting. Raises InputError if no engines hold the weights.
    """
    recipe, lines = subject.recipe, dict[tuple[int, ...], str]()
    engines = nearest_engines(subject)
    near = _by_changes(subject, lambda choice: too_large(subject, choice))
    for choice in islice(near, _EXAMINED):
        candidate = apply_choice(recipe, replace(choice, engines=engines))
        if choice.layout.shape not in lines and refusal(candidate, subject.model) is None:
            lines[choice.layout.shape] = " ".join(overrides(recipe, candidate))
        if len(lines) == _COUNT:
            break
    return list(lines.values())


def _by_changes(subject: Subject, too_large: Callable[[Choice], bool]) -> Iterator[Choice]:
    current = _settings(choice_of(subject.recipe))

    interleaving = (None, subject.recipe.megatron.virtual_pipeline)  # others take more memory and long to count

    def changes(choice: Choice) -> int:
        return sum(value != before for value, before in zip(_settings(choice), current, strict=True))

    every = sorted((choice for family in families(subject) for choice in family.choices), key=changes)
    for number, group in groupby(every, key=changes):
        near = (choice for choice in group if number and choice.layout.virtual_pipeline in interleaving)
        may_fit = [choice for choice in near if not too_large(choice)]
        # First the choices with the recipe's forecast setting: each other setting is counted first, which takes seconds.
        laid_out = [(choice, apply_choice(subject.recipe, choice)) for choice in may_fit]
        laid_out.sort(
            key=lambda entry: (
                setting(entry[1].megatron) != setting(subject.recipe.megatron),
                subject.step_seconds(entry[1]),
            )
        )
        yield from (choice for choice, _ in laid_out)


@contextlib.contextmanager
def with_suggestions(path: Path, settings: Sequence[str], model: str | None, device: Device | None) -> Iterator[None]:
    """Add layouts that divide, or the devices that are needed, to an error inside the block that the recipe's layout caused."""
    try:
        yield
    except (RecipeError, InputError) as error:
        lines = [] if device is None else _instead(path, settings, model, device)
        if not lines:
            raise
        raise InputError("\n  ".join([str(error), *lines])) from error


def _instead(path: Path, settings: Sequence[str], model: str | None, device: Device) -> list[str]:
    try:
        recipe = load_recipe(path, settings, check=False)
        config = policy_config_of(recipe.model, path, model)
        to_blame = refusal(recipe, config) and not refusal(with_first_layout(recipe, config, device), config)
        return _lines_of(subject_of(recipe, {"rollout": config}, device)) if to_blame else []
    except ValueError:
        return []  # there is another fault, and the original error names it


def _lines_of(subject: Subject) -> list[str]:
    """Return the lines below the error: layouts that divide, or the reason why none is proposed."""
    try:
        layouts = uncounted_layouts(subject)
    except InputError as error:  # no engines hold the weights
        return [str(error)]
    if not layouts:
        return [text] if (text := shortage(subject)) else []
    remark = "Their memory was not counted: plan them, or search for more with --search."
    return [*(f"divides   {line}" for line in layouts), remark]
