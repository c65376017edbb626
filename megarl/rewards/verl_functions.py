"""Reward functions written for verl, `compute_score(data_source, solution_str, ground_truth, extra_info)`, as scorers.

They are called as by verl's reward managers naive and dapo (verl/experimental/reward_loop/reward_manager/naive.py).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.types import Turn

if TYPE_CHECKING:
    from megarl.rewards.base import ScoreRequest

_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TOKENIZER = "reward_model_tokenizer"


def is_verl_function(function: Callable[..., Any]) -> bool:
    """Return True for a function with a parameter `solution_str`, or with keyword arguments of any name alone.

    Raises ValueError if the function has no signature.
    """
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    return "solution_str" in parameters or kinds == [inspect.Parameter.VAR_KEYWORD]


def verl_scorer(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[ScoreRequest], Any]:
    """Return a function of a `ScoreRequest` that calls `function` as verl does; async if `function` is.

    arguments: keyword arguments that take precedence over verl's four (custom_reward_function.reward_kwargs).
    A text as `reward_model_tokenizer` is the folder of the tokenizer that `function` gets.
    Raises TypeError if `function` cannot be called so.
    """
    inspect.signature(function).bind(**{**dict.fromkeys(_PARAMETERS), **arguments})
    if inspect.iscoroutinefunction(function):

        async def score_awaited(request: ScoreRequest) -> Any:
            return _result(await function(**{**_call(request), **_loaded(arguments)}))

        return score_awaited

    def score(request: ScoreRequest) -> Any:
        return _result(function(**{**_call(request), **_loaded(arguments)}))

    return score


def prepare_arguments(arguments: dict[str, Any]) -> None:
    """Load the tokenizer that `arguments` name. Raises as transformers does."""
    _loaded(arguments)


def _loaded(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the tokenizer in place of its folder, as verl passes it with a reward model."""
    folder = arguments.get(_TOKENIZER)
    return {**arguments, _TOKENIZER: _tokenizer(folder)} if isinstance(folder, str) else arguments


@functools.cache
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _call(request: ScoreRequest) -> dict[str, Any]:
    added = {
        "num_turns": _turns(request.turns),
        "rollout_reward_scores": {},
        "turn_scores": [turn.reward for turn in request.turns if turn.role == "user"],
        "tool_rewards": [turn.reward for turn in request.turns if turn.role == "tool"],
    }
    by_loop = {name: request.extra_info[name] for name in request.loop_fields}
    return {
        "data_source": request.data_source,
        "solution_str": request.response,
        "ground_truth": request.ground_truth,
        "extra_info": {**request.extra_info, **added, **by_loop},
    }


def _turns(turns: Sequence[Turn]) -> int:
    """Return verl's number of turns: the prompt, the policy's turns, the user's replies, and tools' answers to a turn together as
    one."""
    if not turns:
        return 2
    roles = [role for role, _ in itertools.groupby(turns, key=lambda turn: turn.role)]
    return 1 + sum(turn.role == "assistant" for turn in turns) + roles.count("tool") + roles.count("user")


def _result(result: Any) -> Any:
    """Convert verl's result: `acc` (a number's own value) is the accuracy, and `pred` the answer.

    Other values of a dict that are not finite numbers have no place in a score, and verl only logs them: they are left out.
    """
    if not isinstance(result, dict):
        number = _plain(result)
        return {"score": number, "accuracy": number} if isinstance(number, Real) else result
    values = {name: _plain(value) for name, value in result.items()}
    score = {name: value for name, value in values.items() if name == "score" or _is_finite(value)}
    if "acc" in score:
        score.setdefault("accuracy", score["acc"])
    for name in ("steps", "answer", "reason"):  # megarl's own names, which verl does not know
        score.pop(name, None)
    if values.get("pred") is not None:
        score.pop("pred", None)
        score["answer"] = str(values["pred"])
    return score


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return the number of a numpy or torch scalar, and other values as they are."""
    if isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value
