"""Tools inside their processes: one call of a function, or the calls of a sample that share a state."""

from __future__ import annotations

import inspect
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np

from megarl.agents import Answer, Context, Tool, ToolUnavailable, find
from megarl.agents.tool import ToolFault
from megarl.subprocess_pool.job import Job

WORK = f"{__name__}:tool_job"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # Pillow's; others are converted


def tool_job(path: str, settings: dict[str, Any]) -> Job:
    """Return the job of a worker process for the tool `path`, see `find`."""
    tool = find(path)
    prepare = tool.prepare
    function = SampleState(tool).run if tool.stateful else caller_of(tool)
    return Job(function, (lambda: prepare(settings)) if prepare else None)


@dataclass(frozen=True)
class ToolRequest:
    """A call of the policy; for a tool with state also the end of its sample, with or without the reward."""

    arguments: dict[str, Any]
    context: Context = field(default_factory=lambda: Context(""))
    step: Literal["call", "reward", "end"] = "call"


@dataclass(frozen=True)
class ToolException:
    """An exception of a tool, for the policy to read."""

    text: str


@dataclass(frozen=True)
class UnavailableNow:
    """The tool cannot be used now. `is_outage`: False for a `ToolFault`."""

    cause: str
    is_outage: bool = True

    def exception(self) -> ToolUnavailable:
        """Return the exception that the tool has raised."""
        return ToolUnavailable(self.cause) if self.is_outage else ToolFault(self.cause)


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


class SampleState:
    """A tool with state, in the process of one sample: the first call creates its object."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.object: Any = None

    async def run(self, request: ToolRequest) -> Answer | ToolException | UnavailableNow:
        """Answer a call. For the step "reward" return the final reward, and end; for "end" return an empty answer."""
        try:
            if request.step == "call":
                return await self._call(request)
            return await self._end(request.step == "reward")
        except Exception as error:  # noqa: BLE001 -- the policy reads it
            return _failure_of(error)

    async def _call(self, request: ToolRequest) -> Answer:
        if self.object is None:
            try:
                created = self.tool.function()
                if hasattr(created, "start"):
                    await _result(created.start(request.context))
            except Exception as error:  # not the policy's fault
                raise _blamed(error, "it could not start") from error
            self.object = created
        context = {self.tool.context: request.context} if self.tool.context is not None else {}
        return _answer_of(self.tool, await _result(self.object.call(**request.arguments, **context)))

    async def _end(self, with_reward: bool) -> Answer:
        """Call `reward`, if it counts, and `end`. Raises ToolUnavailable or ToolFault if one of them fails."""
        ended, self.object = self.object, None
        try:
            reward = await _call_if_present(ended, "reward") if with_reward else None
        finally:
            await _call_if_present(ended, "end")
        return _answer_of(self.tool, Answer("", 0.0 if reward is None else reward))


async def _call_if_present(state: Any, method: str) -> Any:
    """Call a method without arguments; returns None if the object lacks it. Raises ToolUnavailable or ToolFault if it fails."""
    try:
        return await _result(getattr(state, method)()) if hasattr(state, method) else None
    except Exception as error:
        raise _blamed(error, f"its method {method} failed") from error


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _blamed(error: Exception, problem: str) -> ToolUnavailable:
    """Return the exception for an error of a method that the policy has not called: ToolUnavailable if the method raised it."""
    if isinstance(error, ToolUnavailable):
        return UnavailableNow(f"{problem}: {error}", error.is_outage).exception()
    return ToolFault(f"{problem}: {type(error).__name__}: {error}")


def _failure_of(error: Exception) -> ToolException | UnavailableNow:
    """Classify a tool's exception: the policy's mistake, unless it is `ToolUnavailable`."""
    if isinstance(error, ToolUnavailable):
        return UnavailableNow(str(error), error.is_outage)
    return ToolException(f"{type(error).__name__}: {error}")


def _answer_of(tool: Tool, result: Any) -> Answer:
    """Convert a tool's result to text and reward. Raises ToolFault for an invalid `Answer`, which is the author's mistake and not
    the policy's."""
    if not isinstance(result, Answer):
        return Answer(as_text(result))
    text, reward, images = result.text, result.reward, result.images
    if not isinstance(text, str):
        raise ToolFault(f"the text of its answer is {text!r} ({type(text).__name__})")
    if not isinstance(reward, (Real, np.bool_)) or not math.isfinite(reward):
        raise ToolFault(f"the reward of its answer is {reward!r}, not a finite number")
    if not isinstance(images, (list, tuple)):
        raise ToolFault(f"the images of its answer are a {type(images).__name__}, not a list")
    encoded = tuple(_encoded(image, number) for number, image in enumerate(images))
    return replace(result, text=str(text), reward=float(reward), images=encoded)


def _encoded(image: Any, number: int) -> bytes:
    """Return an image of an answer as an encoded file. Raises ToolFault."""
    if isinstance(image, bytes):
        return image
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise ToolFault(
            f"image {number} of its answer is neither bytes nor a Pillow image, but a {type(image).__name__}"
        )
    file = io.BytesIO()
    try:
        (image if image.mode in _PNG_MODES else image.convert("RGB")).save(file, "PNG")
    except Exception as error:  # whatever Pillow's converters and encoders raise
        raise ToolFault(f"image {number} of its answer cannot be written as PNG: {error}") from error
    return file.getvalue()


def as_text(result: Any) -> str:
    """Return text unchanged, and other values as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
