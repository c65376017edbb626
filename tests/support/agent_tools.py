"""Tools that a test's policy calls; they run in separate processes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np

from megarl.agents import Answer, Context, ToolUnavailable, tool


@tool
def add(a: int, b: float = 0.5) -> float:
    """Adds two numbers.

    Args:
        a: The first one.
        b (float): The second one,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


@tool(name="look-up")
def look_up(key: str, context: Context) -> str:
    """Tells the value of a key."""
    return str(context.extra_info["table"][key])


@tool
async def wait(seconds: float, mood: Literal["calm", "hasty"] = "calm") -> dict[str, object]:
    """Waits."""
    await asyncio.sleep(seconds)
    return {"mood": mood, "waited": True}


@tool
def rewarded(text: str) -> Answer:
    """Rewards the turn."""
    return Answer(text, reward=0.5)


@tool
def misbehave(how: str) -> str:
    """Fail in the way that `how` names."""
    if how == "hang":
        time.sleep(60)
    if how == "exit":
        os._exit(3)
    if how == "quit":
        raise SystemExit("bye")
    if how == "absent":
        raise ToolUnavailable("the index is being rebuilt")
    raise ValueError(how)


@tool
def search(index: str) -> str:
    """Reads the file of an index, which may be missing for a while."""
    if not Path(index).exists():
        raise ToolUnavailable("there is no index")
    return Path(index).read_text()


@tool
def odd(kind: str) -> Answer:
    """Return an invalid answer."""
    answers = {"nan": ("a", float("nan")), "text": (None, 0.0), "numpy": ("a", np.float32(0.5))}
    return Answer(*answers[kind])  # type: ignore[arg-type]


def not_a_tool(a: int) -> int:
    """A function without the `tool` decorator."""
    return a


@tool
def find_digit(key: str, context: Context) -> str:
    """Tells the digit of a key."""
    return str(context.extra_info["table"][key])
