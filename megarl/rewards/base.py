"""The registry of scorers, and the one place where a scorer is called."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from megarl.registry import import_own


@dataclass(frozen=True)
class ScoreRequest:
    """What a scorer sees of one sample.

    `response` is the decoded response without special tokens; `ground_truth` and `extra_info` are
    the row's own; `prompt_text` is what the model was given; `uid` names the row in errors.
    """

    response: str
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt_text: str = ""
    uid: str = ""


@dataclass(frozen=True)
class Score:
    """A finite reward, named parts of it for metrics and dynamic sampling, and what was taken for the answer.

    `answer` is None where the scorer found or names none; majority votes count equal answers.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


class RewardError(ValueError):
    """A scorer failed on one row. `scorer`, `uid` and `cause` say which, where and why."""

    def __init__(self, scorer: str, uid: str, cause: str) -> None:
        super().__init__(scorer, uid, cause)  # as args, so that it survives pickling between processes
        self.scorer, self.uid, self.cause = scorer, uid, cause

    def __str__(self) -> str:
        return f"scorer {self.scorer!r} failed on row {self.uid!r}: {self.cause}"


ScoreFunction = Callable[[ScoreRequest], Any]


@dataclass(frozen=True)
class Scorer:
    """A scoring function under the name that errors and recipes call it by.

    The function returns a number, or a dict with `score`, any number of named numeric parts, and
    `answer`, the text that it took for the answer (or None).
    """

    name: str
    function: ScoreFunction


_scorers: dict[str, Scorer] = {}
_sources: dict[str, Scorer] = {}  # data_source, or a pattern such as aime*, to its scorer


def scorer(name: str, sources: Iterable[str] = ()) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the scorer `name`, chosen for rows whose `data_source` is among `sources`.

    A source may be a shell pattern (``aime*``); one that is spelled out wins over a pattern.
    The function itself is returned unchanged.
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        entry = Scorer(name, function)
        assert name not in _scorers, f"scorer {name!r} is registered twice"
        _scorers[name] = entry
        for source in sources:
            assert source not in _sources, f"{source!r} is claimed by {_sources[source].name!r} and {name!r}"
            _sources[source] = entry
        return function

    return register


def resolve(function: str | None, data_sources: Iterable[str]) -> dict[str, Scorer]:
    """The scorer of each data source.

    `function` (the recipe's reward.function) is a registered name or ``module:function``, imported
    from the current directory or PYTHONPATH, and scores every row; None chooses by data source.

    Raises:
        ValueError: there is no such scorer; the message names the nearest known one. Call this
            before anything is started.
    """
    if function is not None:
        chosen = _import_scorer(function) if ":" in function else _registered(function)
        return {source: chosen for source in data_sources}
    return {source: _scorer_of(source) for source in data_sources}


def score(scorer: Scorer, request: ScoreRequest) -> Score:
    """Call a scorer and hold it to its contract.

    Raises:
        RewardError: it raised, or returned something that is not a finite number or a dict with a
            finite `score` and numeric parts.
    """
    try:
        result = scorer.function(request)
    except Exception as error:
        raise RewardError(scorer.name, request.uid, f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(result, dict):
        return Score(_finite(scorer, request, "the score", result))
    if "score" not in result:
        raise RewardError(scorer.name, request.uid, f"its dict has no 'score', but {sorted(map(str, result))}")
    answer = result.get("answer")
    if not isinstance(answer, (str, type(None))):
        raise RewardError(scorer.name, request.uid, f"its answer is {answer!r}, not text")
    numbers = {
        str(name): _finite(scorer, request, repr(name), value) for name, value in result.items() if name != "answer"
    }
    return Score(numbers.pop("score"), numbers, answer)


def _finite(scorer: Scorer, request: ScoreRequest, what: str, value: Any) -> float:
    if not isinstance(value, (Real, np.bool_)):
        raise RewardError(scorer.name, request.uid, f"{what} is {value!r} ({type(value).__name__}), not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(scorer.name, request.uid, f"{what} is {number}, not a finite number")
    return number


def _registered(name: str) -> Scorer:
    if name not in _scorers:
        raise ValueError(
            f"reward.function: there is no scorer {name!r}{_nearest(name, _scorers)}. "
            f"Known: {', '.join(sorted(_scorers))}; your own is given as module:function"
        )
    return _scorers[name]


def _scorer_of(source: str) -> Scorer:
    if source in _sources:
        return _sources[source]
    matches = {entry.name: entry for pattern, entry in _sources.items() if fnmatchcase(source, pattern)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        raise ValueError(f"data_source {source!r} fits the scorers {sorted(matches)}: set reward.function to one")
    raise ValueError(
        f"no scorer for data_source {source!r}{_nearest(source, _sources)}. Known: {', '.join(sorted(_sources))}. "
        f"Rename the rows' data_source, or set reward.function to a scorer ({', '.join(sorted(_scorers))}) "
        f"or to your own module:function"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _import_scorer(path: str) -> Scorer:
    module_name, _, function_name = path.partition(":")
    try:
        module = import_own(module_name)
    except Exception as error:
        raise ValueError(
            f"reward.function {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. "
            f"It is looked for in {Path.cwd()} and on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward.function {path!r}: {module_name} has no function {function_name!r}"
            f"{_nearest(function_name, functions)}. Its functions: {', '.join(sorted(functions)) or 'none'}"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"reward.function {path!r} is called with one argument, a ScoreRequest, "
            f"but its signature is {function_name}{inspect.signature(function)}"
        ) from error
    return Scorer(path, function)
