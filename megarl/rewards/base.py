"""Scorer registry; `score` and `score_awaited` are the only callers of scorers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import numpy as np

from megarl.errors import Unavailable
from megarl.registry import Registry, did_you_mean, import_function
from megarl.rewards.settings import ScorerSettings
from megarl.rewards.verl_functions import is_verl_function, prepare_arguments, verl_scorer
from megarl.types import Turn

LARGEST_SCORE = 1e15
"""Larger scores are errors of the scorer: squares of them overflow, so that advantages would be 0."""


@dataclass(frozen=True)
class ScoreRequest:
    """Input of a scorer: one sample.

    `response` is the decoded response without special tokens; ends of steps count its characters. `ground_truth` and
    `extra_info` come from the row. `prompt_text` is the prompt as the model received it. `uid` names the row in
    errors. With tools, `response` joins the policy's turns in order, without the tools' answers; `turns` has all
    turns, the tools' included. `messages` are the row's, each with `role` and `content`; they are empty unless the
    reward uses the scorer `remote` or `reward_model`. `loop_fields` names the fields of `extra_info` that the user's agent
    loop has set.
    """

    response: str
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt_text: str = ""
    uid: str = ""
    turns: tuple[Turn, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    loop_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """A finite reward with its named parts (for metrics and dynamic sampling) and the extracted answer.

    `value` is the whole reward: the scorer's `score` plus the rewards of its `steps`. `parts["steps"]` is the sum of
    the step rewards, if the scorer returned `steps`. `answer` is None if the scorer extracts none; majority votes
    count equal answers. `reason` is the scorer's explanation for readers.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    steps: tuple[tuple[int, float], ...] = ()  # (end in characters of the response, reward), ends increasing
    reason: str = ""


class ScorerUnavailable(Unavailable):
    """A scorer cannot score now, because a service that it needs is down. The sample waits until the service is back.

    `after`: seconds of waiting that the service asks for.
    """

    def __init__(self, cause: str, after: float = 0.0) -> None:
        super().__init__(cause)
        self.after = after


class RewardError(ValueError):
    """The scorer `scorer` failed on the row `uid`, because of `cause`. `unavailable`: set if it raised ScorerUnavailable."""

    def __init__(self, scorer: str, uid: str, cause: str, unavailable: ScorerUnavailable | None = None) -> None:
        super().__init__(scorer, uid, cause, unavailable)  # as args, so that it survives pickling between processes
        self.scorer, self.uid, self.cause, self.unavailable = scorer, uid, cause, unavailable

    def __str__(self) -> str:
        return f"scorer {self.scorer!r} failed on row {self.uid!r}: {self.cause}"


ScoreFunction = Callable[..., Any]


@dataclass(frozen=True)
class Scorer:
    """A scoring function with its name in errors and recipes.

    The function returns a number, or a dict with `score` and optionally:

    - any named numeric parts;
    - `answer`: the extracted answer, text or None;
    - `reason`: an explanation, shown with the score;
    - `steps`: process rewards, a list of (end, reward). A step ends at character `end` of the response,
      1 <= end <= len(response), and ends increase. The list may be empty.

    A step's reward counts at the step's end, `score` at the response's end. The sample's reward is their sum, as verl
    sums token rewards. So `{"score": 1.0, "steps": [(12, 0.25), (30, -0.5)]}` is a reward of 0.75.

    An `async def` function is awaited; one process awaits many at a time.

    in_process: call the function in the rollout process. Only for functions that take microseconds and cannot hang,
        because no time limit stops them. Other scorers run in the subprocess pool.
    prepare: called once before the first sample. It imports slow libraries, so that no sample's time limit includes
        the import, and raises if a library is not installed.
    settings: `find` and `resolve` bind the recipe's `ScorerSettings` as the last argument of both functions.
    needs_ground_truth: rows without a ground truth are rejected.
    slow_is_wrong: a response that cannot be scored within reward.timeout has the score 0 and the part `too_slow`, at once. For
        scorers that compute with the response, as an answer such as 2^100000000 costs. Otherwise it is a failure.
    """

    name: str
    function: ScoreFunction
    in_process: bool = False
    prepare: Callable[..., Any] | None = None
    settings: bool = False
    needs_ground_truth: bool = False
    slow_is_wrong: bool = False

    @property
    def awaited(self) -> bool:
        """True for an `async def` function: one process may run many calls at a time."""
        return inspect.iscoroutinefunction(self.function)


SCORERS: Registry[Scorer] = Registry("scorer")
_sources: dict[str, Scorer] = {}  # data_source, or a pattern such as aime*, to its scorer


def scorer(
    name: str,
    sources: Iterable[str] = (),
    *,
    in_process: bool = False,
    prepare: Callable[..., Any] | None = None,
    settings: bool = False,
    needs_ground_truth: bool = True,
    slow_is_wrong: bool = False,
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the scorer `name`, the default for rows with a `data_source` among `sources`.

    A source may be a shell pattern (``aime*``); an exact name takes precedence over a pattern.
    The other arguments: see `Scorer`. Returns the function unchanged.
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        entry = SCORERS.register(name)(
            Scorer(name, function, in_process, prepare, settings, needs_ground_truth, slow_is_wrong)
        )
        for source in sources:
            assert source not in _sources, f"{source!r} is claimed by {_sources[source].name!r} and {name!r}"
            _sources[source] = entry
        return function

    return register


def resolve(
    function: str | None, data_sources: Iterable[str], settings: ScorerSettings | None = None
) -> dict[str, Scorer]:
    """Return the scorer of each data source, with the recipe's settings (None: the defaults).

    `function` (the recipe's reward.function) is a registered name, ``module:function``, imported from the current
    directory or PYTHONPATH, or ``file.py:function``. It scores every row; None chooses by data source. Call this before
    the run starts processes.

    Raises:
        ValueError: the scorer does not exist; the message suggests the most similar name.
    """
    if function is not None:
        chosen = find(function, settings)
        return {source: chosen for source in data_sources}
    return {source: _with(settings, _scorer_of(source)) for source in data_sources}


def demands_ground_truth(name: str) -> bool:
    """Return True if the scorer `name` rejects rows without a ground truth; False for ``module:function``."""
    return name in SCORERS and SCORERS[name].needs_ground_truth


def find(name: str, settings: ScorerSettings | None = None) -> Scorer:
    """Return the scorer registered as `name`, or import ``module:function``. Settings and errors as in `resolve`."""
    if ":" in name:
        return _import_scorer(name, {} if settings is None else settings.arguments.get(name, {}))
    if name not in SCORERS:
        raise ValueError(f"reward.function: {SCORERS.unknown(name)} A scorer of your own is given as module:function")
    return _with(settings, SCORERS[name])


def _with(settings: ScorerSettings | None, entry: Scorer) -> Scorer:
    if not entry.settings:
        return entry
    bound = settings or ScorerSettings()
    prepare = None if entry.prepare is None else functools.partial(entry.prepare, bound)
    return replace(entry, function=functools.partial(entry.function, settings=bound), prepare=prepare, settings=False)


def score(scorer: Scorer, request: ScoreRequest) -> Score:
    """Call a scorer and check its result.

    Raises:
        RewardError: the scorer raised, or its result breaks the contract of `Scorer`: a finite number, or a dict with
            a finite `score`, numeric parts and valid steps.
    """
    try:
        result = scorer.function(request)
        if inspect.isawaitable(result):
            result = _loop().run_until_complete(result)
    except Exception as error:
        raise _reward_error(scorer, request, error) from error
    return _checked(scorer, request, result)


async def score_awaited(scorer: Scorer, request: ScoreRequest) -> Score:
    """Like `score`, for an `awaited` scorer."""
    try:
        result = await scorer.function(request)
    except Exception as error:
        raise _reward_error(scorer, request, error) from error
    return _checked(scorer, request, result)


def _reward_error(scorer: Scorer, request: ScoreRequest, error: Exception) -> RewardError:
    if isinstance(error, ScorerUnavailable):  # without a user's subclass, which other processes cannot unpickle
        return RewardError(scorer.name, request.uid, str(error), ScorerUnavailable(str(error), error.after))
    return RewardError(scorer.name, request.uid, f"it raised {type(error).__name__}: {error}")


def _checked(scorer: Scorer, request: ScoreRequest, result: Any) -> Score:
    """Convert a scorer's result to a Score; RewardError if it breaks the contract of `Scorer`."""
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
    answer, reason = (
        None if answer is None else str(answer),
        str(reason),
    )  # not subclasses of str: any process can unpickle these
    if "steps" not in result:
        return Score(value, numbers, answer, reason=reason)
    steps = _checked_steps(scorer, request, result["steps"])
    earned = [reward for _, reward in steps]
    return Score(math.fsum([value, *earned]), {**numbers, "steps": math.fsum(earned)}, answer, steps, reason)


_thread = threading.local()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this thread. It is kept, so that a scorer can reuse connections between calls."""
    if not hasattr(_thread, "loop"):
        _thread.loop = asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = _thread.loop
    return loop


def _checked_steps(scorer: Scorer, request: ScoreRequest, value: Any) -> tuple[tuple[int, float], ...]:
    """Convert `steps` of a scorer's result; RewardError if they break the contract of `Scorer`."""

    def broken(cause: str) -> RewardError:
        return RewardError(scorer.name, request.uid, cause)

    if not isinstance(value, (list, tuple)):
        raise broken(f"'steps' is {value!r} ({type(value).__name__}), not a list of (end, reward)")
    steps: list[tuple[int, float]] = []
    for number, step in enumerate(value):
        label, length = f"steps[{number}]", len(request.response)
        if not isinstance(step, (list, tuple)) or len(step) != 2:
            raise broken(f"{label} is {step!r}, not (end, reward)")
        if not isinstance(step[0], (int, np.integer)) or isinstance(step[0], bool):
            raise broken(f"{label} ends at {step[0]!r} ({type(step[0]).__name__}), not at a whole number of characters")
        end, before = int(step[0]), steps[-1][0] if steps else 0
        if not 1 <= end <= length:
            raise broken(
                f"{label} ends at character {end}, and the response has {length}: an end is 1 to len(response)"
            )
        if end <= before:
            raise broken(f"{label} ends at character {end}, and the step before it at {before}: ends must increase")
        steps.append((end, _finite(scorer, request, f"the reward of {label}", step[1])))
    return tuple(steps)


def _finite(scorer: Scorer, request: ScoreRequest, label: str, value: Any) -> float:
    if not isinstance(value, (Real, np.bool_)):
        raise RewardError(scorer.name, request.uid, f"{label} is {value!r} ({type(value).__name__}), not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(scorer.name, request.uid, f"{label} is {number}, not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise RewardError(scorer.name, request.uid, f"{label} is {number:g}, and the limit is {LARGEST_SCORE:g}")
    return number


def _scorer_of(source: str) -> Scorer:
    if source in _sources:
        return _sources[source]
    matches = {entry.name: entry for pattern, entry in _sources.items() if fnmatchcase(source, pattern)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        raise ValueError(
            f"data_source {source!r} matches the scorers {sorted(matches)}: set reward.function to one of them"
        )
    raise ValueError(
        f"no scorer for data_source {source!r}{did_you_mean(source, _sources)} "
        f"Data sources with a scorer: {', '.join(sorted(_sources))}. "
        f"Rename the rows' data_source, or set reward.function to a scorer ({', '.join(SCORERS.names())}) "
        f"or to module:function for a scorer from your code"
    )


def _import_scorer(path: str, arguments: dict[str, Any]) -> Scorer:
    function = import_function(path, "reward.function")
    try:
        of_verl = is_verl_function(function)
    except ValueError as error:
        raise ValueError(f"reward.function {path!r} is not a function written in Python: {error}") from error
    try:
        if of_verl:
            return Scorer(
                path, verl_scorer(function, arguments), prepare=functools.partial(prepare_arguments, arguments)
            )
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        form = "verl's four arguments" if of_verl else "one argument, a ScoreRequest"
        more = f" and reward.arguments ({', '.join(arguments)})" if arguments else ""
        raise ValueError(
            f"reward.function {path!r} is called with {form}{more}, "
            f"but its signature is {path.partition(':')[2]}{inspect.signature(function)}: {error}"
        ) from error
    return Scorer(path, functools.partial(function, **arguments) if arguments else function)
