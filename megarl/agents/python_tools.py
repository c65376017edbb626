"""Python tools in processes that can be killed."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from megarl.agents import Answer, Context, Tool, ToolUnavailable, find
from megarl.agents.toolbox import CallOutcome
from megarl.subprocess_pool.job import Job
from megarl.subprocess_pool.pool import Failed, ProcessPool

WORK = f"{__name__}:tool_job"


def tool_job(path: str, settings: dict[str, Any]) -> Job:
    """Return the job of a worker process for the tool `path`, a registered name or module:function."""
    tool = find(path)
    prepare = tool.prepare
    return Job(caller_of(tool), (lambda: prepare(settings)) if prepare else None)


class PythonTools:
    """A `Caller` with worker processes. `paths`: tool name -> registered name or module:function."""

    def __init__(self, paths: Mapping[str, str], settings: dict[str, Any], *, processes: int, timeout: float) -> None:
        self._paths, self._timeout = dict(paths), timeout
        self._pool = ProcessPool(
            WORK,
            sorted(self._paths.values()),
            settings,
            processes=processes,
            timeout=timeout,
            retries=0,
            at_once=1,  # a call must not wait while a process is idle
            timeout_key="agent.tool_timeout",
        )

    def start(self) -> None:
        """Wait until tools can be called. Raises RuntimeError if one cannot be imported."""
        self._pool.start()

    def close(self) -> None:
        self._pool.close()

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        request = ToolRequest(arguments, context)
        done = await asyncio.wrap_future(self._pool.submit(self._paths[name], request, timeout))
        if isinstance(done, Failed):
            return CallOutcome(Answer(_failure_text(done, timeout)), done.seconds, done.kind)
        if isinstance(done.value, UnavailableNow):
            raise ToolUnavailable(done.value.cause)
        if isinstance(done.value, ToolException):
            return CallOutcome(Answer(f"Error: {done.value.text}"), done.seconds, "error")
        return CallOutcome(done.value, done.seconds)


def _failure_text(failed: Failed, timeout: float) -> str:
    """Describe a failure of the process to the policy."""
    if failed.kind == "timeout":
        return f"Error: it was stopped after {timeout:g} seconds"
    return "Error: it crashed" if failed.kind == "crash" else f"Error: {failed.cause}"


# --- in a worker process ---------------------------------------------------------------------------------------------


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


def caller_of(tool: Tool) -> Callable[[ToolRequest], Any]:
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


def _answer_of(tool: Tool, result: Any) -> Answer:
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
