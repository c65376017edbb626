"""Python tools inside worker processes of megarl/subprocess_pool."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from megarl import agents
from megarl.agents import Answer, Context, ToolUnavailable


@dataclass(frozen=True)
class ToolRequest:
    arguments: dict[str, Any]
    context: Context = field(default_factory=lambda: Context(""))


@dataclass(frozen=True)
class ToolException:
    """An exception of a tool, for the policy to read."""

    text: str


@dataclass(frozen=True)
class UnavailableNow:
    """The tool cannot be used now."""

    cause: str


def caller_of(tool: agents.Tool) -> Callable[[ToolRequest], Any]:
    """Return the function that calls `tool` with checked arguments.

    It is async if the tool is. The loop of the process stays, so that an async tool may keep a connection between calls.
    """

    def arguments_of(request: ToolRequest) -> dict[str, Any]:
        context = {tool.context: request.context} if tool.context is not None else {}
        return {**request.arguments, **context}

    def call(request: ToolRequest) -> Answer | ToolException | UnavailableNow:
        try:
            return _answer_of(tool, tool.function(**arguments_of(request)))
        except Exception as error:  # noqa: BLE001 -- the policy reads it
            return _failure_of(error)

    async def call_async(request: ToolRequest) -> Answer | ToolException | UnavailableNow:
        try:
            return _answer_of(tool, await tool.function(**arguments_of(request)))
        except Exception as error:  # noqa: BLE001 -- the policy reads it
            return _failure_of(error)

    return call_async if inspect.iscoroutinefunction(tool.function) else call


def _failure_of(error: Exception) -> ToolException | UnavailableNow:
    """Classify a tool's exception: the policy's mistake, unless it is `ToolUnavailable`."""
    if isinstance(error, ToolUnavailable):
        return UnavailableNow(str(error))
    return ToolException(f"{type(error).__name__}: {error}")


def _answer_of(tool: agents.Tool, result: Any) -> Answer:
    """Convert a tool's result to text and reward. Raises ToolUnavailable for an invalid `Answer`, which is the author's
    mistake and not the policy's."""
    if not isinstance(result, Answer):
        return Answer(as_text(result))
    text, reward = result.text, result.reward
    if not isinstance(text, str):
        raise ToolUnavailable(f"the text of its answer is {text!r} ({type(text).__name__})")
    if not isinstance(reward, (Real, np.bool_)) or not math.isfinite(reward):
        raise ToolUnavailable(f"the reward of its answer is {reward!r}, not a finite number")
    return Answer(str(text), float(reward))


def as_text(result: Any) -> str:
    """Return text unchanged, and other values as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
