"""The registry of scorers, and the one place where a scorer is called."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from megarl.registry import import_user_module
from megarl.rewards.settings import ScorerSettings
from megarl.types import Turn


@dataclass(frozen=True)
class ScoreRequest:
    """What a scorer sees of one sample.

    `response` is the decoded response without special tokens, in whose characters the ends of steps are
    counted; `ground_truth` and `extra_info` are the row's own; `prompt_text` is what the model was given;
    `uid` names the row in errors. Where an agent loop made the response, `response` is what the policy said, its turns
    one after the other and nothing of what tools answered, and `turns` has all of them in order.
    """

    response: str
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt_text: str = ""
    uid: str = ""
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Score:
    """A finite reward, named parts of it for metrics and dynamic sampling, and what was taken for the answer.

    `value` is the whole reward: what the scorer calls `score`, and the rewards of `steps` besides, whose sum is
    in the part `steps` where the scorer gives any. `answer` is None where the scorer found or names none;
    majority votes count equal answers. `reason` is the scorer's own word on why, for people.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    steps: tuple[tuple[int, float], ...] = ()  # (end in characters of the response, reward), ends increasing
    reason: str = ""


class RewardError(ValueError):
    """A scorer failed on one row. `scorer`, `uid` and `cause` say which, where and why."""

    def __init__(self, scorer: str, uid: str, cause: str) -> None:
        super().__init__(scorer, uid, cause)  # as args, so that it survives pickling between processes
        self.scorer, self.uid, self.cause = scorer, uid, cause

    def __str__(self) -> str:
        return f"scorer {self.scorer!r} failed on row {self.uid!r}: {self.cause}"


ScoreFunction = Callable[..., Any]


@dataclass(frozen=True)
class Scorer:
    """A scoring function under the name that errors and recipes call it by.

    The function returns a number, or a dict with `score`, any number of named numeric parts,
    `answer`, the text that it took for the answer (or None), `reason`, a text that people see beside the score, and
    `steps`, rewards of steps within the response (process rewards): a list of (end, reward), where a step reaches up to character `end` of
    the response, 1 <= end <= len(response), and ends increase; empty where the response has none.

    Each number is earned once: a step's reward where the step ends, `score` at the response's end. The
    sample's reward is their sum, as it is the sum of token rewards in verl. So `{"score": 1.0, "steps":
    [(12, 0.25), (30, -0.5)]}` is a reward of 0.75.

    An `async def` function is awaited, with others under way in the same process. `in_process`: it takes microseconds and cannot hang, so it is called in the
    rollout process itself, where nothing can end it; others run in processes of their own (megarl/scoring). `prepare`
    is called once before any sample is scored: what takes long to import is imported there, and not at the expense of
    a sample's time; it raises where something is not installed. `needs_ground_truth`: rows without one are refused. `settings`: both are also given the recipe's
    `ScorerSettings`, as their last argument, by whoever finds the scorer; what is found takes the request alone.
    """

    name: str
    function: ScoreFunction
    in_process: bool = False
    prepare: Callable[..., Any] | None = None
    settings: bool = False
    needs_ground_truth: bool = False

    @property
    def awaited(self) -> bool:
        """Whether it waits more than it computes, as far as can be seen: many may be under way in one process."""
        return inspect.iscoroutinefunction(self.function)


_scorers: dict[str, Scorer] = {}
_sources: dict[str, Scorer] = {}  # data_source, or a pattern such as aime*, to its scorer


def scorer(
    name: str,
    sources: Iterable[str] = (),
    *,
    in_process: bool = False,
    prepare: Callable[..., Any] | None = None,
    settings: bool = False,
    needs_ground_truth: bool = True,
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the scorer `name`, chosen for rows whose `data_source` is among `sources`.

    A source may be a shell pattern (``aime*``); one that is spelled out wins over a pattern.
    `in_process`, `prepare`, `settings` and `needs_ground_truth`: see `Scorer`. The function itself is returned unchanged.
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        entry = Scorer(name, function, in_process, prepare, settings, needs_ground_truth)
        assert name not in _scorers, f"scorer {name!r} is registered twice"
        _scorers[name] = entry
        for source in sources:
            assert source not in _sources, f"{source!r} is claimed by {_sources[source].name!r} and {name!r}"
            _sources[source] = entry
        return function

    return register


def resolve(
    function: str | None, data_sources: Iterable[str], settings: ScorerSettings | None = None
) -> dict[str, Scorer]:
    """The scorer of each data source, with the recipe's settings (None: the defaults).

    `function` (the recipe's reward.function) is a registered name or ``module:function``, imported
    from the current directory or PYTHONPATH, and scores every row; None chooses by data source.

    Raises:
        ValueError: there is no such scorer; the message names the nearest known one. Call this
            before anything is started.
    """
    if function is not None:
        chosen = find(function, settings)
        return {source: chosen for source in data_sources}
    return {source: _with(settings, _scorer_of(source)) for source in data_sources}


def demands_ground_truth(name: str) -> bool:
    """Whether the registered scorer `name` refuses rows without a ground truth; False for ``module:function``."""
    return name in _scorers and _scorers[name].needs_ground_truth


def find(name: str, settings: ScorerSettings | None = None) -> Scorer:
    """The scorer that is registered as `name`, or that ``module:function`` names. Otherwise as `resolve`."""
    return _with(settings, _import_scorer(name) if ":" in name else _registered(name))


def _with(settings: ScorerSettings | None, entry: Scorer) -> Scorer:
    if not entry.settings:
        return entry
    given = settings or ScorerSettings()
    prepare = None if entry.prepare is None else functools.partial(entry.prepare, given)
    return replace(entry, function=functools.partial(entry.function, settings=given), prepare=prepare, settings=False)


def score(scorer: Scorer, request: ScoreRequest) -> Score:
    """Call a scorer and hold it to its contract.

    Raises:
        RewardError: it raised, or returned something that is not a finite number or a dict with a
            finite `score`, numeric parts and steps as `Scorer` says.
    """
    try:
        result = scorer.function(request)
        if inspect.isawaitable(result):
            result = _loop().run_until_complete(result)
    except Exception as error:
        raise _raised(scorer, request, error) from error
    return _held(scorer, request, result)


async def score_awaited(scorer: Scorer, request: ScoreRequest) -> Score:
    """As `score`, for a scorer that is `awaited`: others may run while it waits."""
    try:
        result = await scorer.function(request)
    except Exception as error:
        raise _raised(scorer, request, error) from error
    return _held(scorer, request, result)


def _raised(scorer: Scorer, request: ScoreRequest, error: Exception) -> RewardError:
    return RewardError(scorer.name, request.uid, f"it raised {type(error).__name__}: {error}")


def _held(scorer: Scorer, request: ScoreRequest, result: Any) -> Score:
    """What a scorer returned, held to its contract."""
    if not isinstance(result, dict):
        return Score(_finite(scorer, request, "the score", result))
    if "score" not in result:
        raise RewardError(scorer.name, request.uid, f"its dict has no 'score', but {sorted(map(str, result))}")
    answer, reason = result.get("answer"), result.get("reason", "")
    if not isinstance(answer, (str, type(None))):
        raise RewardError(scorer.name, request.uid, f"its answer is {answer!r}, not text")
    if not isinstance(reason, str):
        raise RewardError(scorer.name, request.uid, f"its reason is {reason!r}, not text")
    numbers = {
        str(name): _finite(scorer, request, repr(name), value)
        for name, value in result.items()
        if name not in ("answer", "steps", "reason")
    }
    value = numbers.pop("score")
    answer, reason = None if answer is None else str(answer), str(reason)  # plain ones, which any process can read
    if "steps" not in result:
        return Score(value, numbers, answer, reason=reason)
    steps = _steps(scorer, request, result["steps"])
    earned = [reward for _, reward in steps]
    return Score(math.fsum([value, *earned]), {**numbers, "steps": math.fsum(earned)}, answer, steps, reason)


_of_thread = threading.local()


def _loop() -> asyncio.AbstractEventLoop:
    """One for each thread that scores, kept, so that a scorer may keep a connection open from call to call."""
    if not hasattr(_of_thread, "loop"):
        _of_thread.loop = asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = _of_thread.loop
    return loop


def _steps(scorer: Scorer, request: ScoreRequest, given: Any) -> tuple[tuple[int, float], ...]:
    """Rewards of steps, held to what `Scorer` says of them."""

    def broken(cause: str) -> RewardError:
        return RewardError(scorer.name, request.uid, cause)

    if not isinstance(given, (list, tuple)):
        raise broken(f"'steps' is {given!r} ({type(given).__name__}), not a list of (end, reward)")
    steps: list[tuple[int, float]] = []
    for number, step in enumerate(given):
        what, length = f"steps[{number}]", len(request.response)
        if not isinstance(step, (list, tuple)) or len(step) != 2:
            raise broken(f"{what} is {step!r}, not (end, reward)")
        if not isinstance(step[0], (int, np.integer)) or isinstance(step[0], bool):
            raise broken(f"{what} ends at {step[0]!r} ({type(step[0]).__name__}), not at a whole number of characters")
        end, before = int(step[0]), steps[-1][0] if steps else 0
        if not 1 <= end <= length:
            raise broken(f"{what} ends at character {end}, and the response has {length}: an end is 1 to len(response)")
        if end <= before:
            raise broken(f"{what} ends at character {end}, and the step before it at {before}: ends must increase")
        steps.append((end, _finite(scorer, request, f"the reward of {what}", step[1])))
    return tuple(steps)


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
        module = import_user_module(module_name)
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
