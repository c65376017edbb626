"""Call user-registered losses and advantages once on a small batch, to raise their errors before the run starts."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.inputs import LossInputs, Outcomes, TokenOutcomes
from megarl.errors import RecipeError
from megarl.recipe.algorithm import AlgorithmConfig

_LENGTHS = [5, 4, 5, 4]  # tokens of four samples: two prompts with two samples each
_MASK = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1] * 2, dtype=bool)


def try_user_functions(settings: AlgorithmConfig) -> None:
    """Call the recipe's advantage and loss if they come from `algorithm.modules`.

    Raises RecipeError with the function, its file and line, and the problem.
    """
    if not settings.modules:
        return
    estimator, loss = ADVANTAGES[settings.advantage], LOSSES[settings.loss]
    of_samples, of_tokens = estimator.function, estimator.of_tokens
    if _is_user_function(of_samples):
        assert of_samples is not None
        user = _UserFunction("advantage", settings, of_samples)
        user.expect(user.call(_outcomes()), len(_LENGTHS), "samples")
    if _is_user_function(of_tokens):
        assert of_tokens is not None
        user = _UserFunction("advantage", settings, of_tokens)
        user.expect(user.call(_token_outcomes()), len(_MASK), "tokens")
    if _is_user_function(loss.function):
        _try_loss(_UserFunction("loss", settings, loss.function))


def _is_user_function(function: Any) -> bool:
    return function is not None and not str(function.__module__).startswith("megarl.")


def _outcomes() -> Outcomes:
    rewards = np.array([1.0, 0.0, 0.5, 1.0])
    return Outcomes(
        rewards, np.array([0, 0, 1, 1]), np.array([4, 3, 4, 3]), greedy_rewards=np.array([1.0, 1.0, 0.0, 0.0])
    )


def _token_outcomes() -> TokenOutcomes:
    penalties = np.linspace(-0.2, 0.1, len(_MASK))
    return TokenOutcomes(np.array([1.0, 0.0, 0.5, 1.0]), _MASK, _LENGTHS, penalties=penalties)


def _try_loss(user: _UserFunction) -> None:
    import torch

    def vector(low: float, high: float) -> torch.Tensor:
        return torch.linspace(low, high, len(_MASK))

    top_k = user.settings.distill_top_k
    mask, places = torch.from_numpy(_MASK).float(), (len(_MASK), top_k)
    inputs = LossInputs(
        log_probs=vector(-2.0, -0.1).requires_grad_(),
        loss_mask=mask,
        loss_weights=mask / mask.sum(),
        token_share=mask / mask.sum(),
        lengths=_LENGTHS,
        advantages=vector(-1.0, 1.0),
        old_log_probs=vector(-1.8, -0.2),
        rollout_log_probs=vector(-1.9, -0.15),
        reference_log_probs=vector(-1.0, -0.5),
        reference_top_log_probs=torch.full(places, -5.0 - top_k),
        top_log_probs=torch.full(places, -6.0 - top_k).requires_grad_(),
        entropy=vector(0.1, 0.4),
        chosen=mask > 0,
        selected=vector(-1.0, 1.0) > 0,
        groups=torch.zeros(len(_MASK)),
    )
    result = user.call(inputs)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        user.refuse(f"returned {type(result).__name__}, expected a tuple (loss of each token, dict of metrics)")
    user.expect(result[0], len(_MASK), "tokens")
    if not result[0].requires_grad:
        user.refuse("returned a loss that does not depend on log_probs, so its gradient is zero")
    for name, values in result[1].items():
        user.expect(values, len(_MASK), "tokens", f"as the metric {name!r} ")


@dataclass(frozen=True)
class _UserFunction:
    """A user's function. `key`: "advantage" or "loss", the setting that names it."""

    key: str
    settings: AlgorithmConfig
    function: Callable[..., Any]

    def call(self, argument: Any) -> Any:
        try:
            return self.function(argument, self.settings)
        except Exception as error:  # noqa: BLE001 -- a user's function may raise anything
            file = inspect.getsourcefile(self.function)
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            line = f" in line {lines[-1]}" if lines else ""
            self.refuse(f"failed{line}: {type(error).__name__}: {error}")

    def expect(self, values: Any, count: int, unit: str, label: str = "") -> None:
        """Raise RecipeError unless `values` are `count` numbers. `label` names them in the message."""
        shape = tuple(getattr(values, "shape", ()))
        if shape != (count,):
            text = f"an array of shape {list(shape)}" if hasattr(values, "shape") else type(values).__name__
            self.refuse(f"returned {label}{text}, expected one number for each of {count} {unit}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise RecipeError with the function's place and the problem."""
        name = getattr(self.settings, self.key)
        place = f"{inspect.getsourcefile(self.function)}:{self.function.__code__.co_firstlineno}"
        raise RecipeError(
            f"algorithm.{self.key}",
            f"on a small test batch, {name} ({place}) {problem}",
            "correct the function; docs/algorithms.md, 'Write your own loss or advantage', describes its arguments and its result",
            value=name,
        )
