"""Calls of Python tools in worker processes (megarl/subprocess_pool)."""

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
class Raised:
    """The tool raised this, which the policy is told."""

    text: str


@dataclass(frozen=True)
class Unavailable:
    """The tool cannot be used now."""

    cause: str


def caller_of(tool: agents.Tool) -> Callable[[ToolRequest], Any]:
    """The function that calls `tool`, whose schema the arguments were held to: async where the tool's is, so that it is
    awaited on a loop that stays, and may keep a connection open from call to call."""

    def arguments_of(request: ToolRequest) -> dict[str, Any]:
        context = {tool.context: request.context} if tool.context is not None else {}
        return {**request.arguments, **context}

    def call(request: ToolRequest) -> Answer | Raised | Unavailable:
        try:
            return _held(tool, tool.function(**arguments_of(request)))
        except Exception as error:  # noqa: BLE001 -- told
            return _told(error)

    async def call_async(request: ToolRequest) -> Answer | Raised | Unavailable:
        try:
            return _held(tool, await tool.function(**arguments_of(request)))
        except Exception as error:  # noqa: BLE001 -- told
            return _told(error)

    return call_async if inspect.iscoroutinefunction(tool.function) else call


def _told(error: Exception) -> Raised | Unavailable:
    """What a tool raised is the policy's doing, as far as anybody knows, where it does not say otherwise."""
    if isinstance(error, ToolUnavailable):
        return Unavailable(str(error))
    return Raised(f"{type(error).__name__}: {error}")


def _held(tool: agents.Tool, result: Any) -> Answer:
    """What a tool returned, as plain text and number. ToolUnavailable where its author made it something else: the policy
    could do nothing about it."""
    if not isinstance(result, Answer):
        return Answer(as_text(result))
    text, reward = result.text, result.reward
    if not isinstance(text, str):
        raise ToolUnavailable(f"the text of its answer is {text!r} ({type(text).__name__})")
    if not isinstance(reward, (Real, np.bool_)) or not math.isfinite(reward):
        raise ToolUnavailable(f"the reward of its answer is {reward!r}, not a finite number")
    return Answer(str(text), float(reward))


def as_text(result: Any) -> str:
    """What a tool returned, as the policy reads it: text as it stands, other values as JSON where they can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
