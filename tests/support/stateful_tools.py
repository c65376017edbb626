"""Tools with state that a test's policy calls; they run in the process of their sample."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from megarl.agents import Answer, Context, ToolUnavailable, tool


def log(context: Context, line: str) -> None:
    """Append a line to the file that the row names: the tools run in other processes."""
    with Path(context.extra_info["log"]).open("a") as file:
        file.write(f"{context.sample} {line}\n")


@tool
class submit:
    """Rewards improvements: an answer earns the progress since the best earlier one."""

    def start(self, context: Context) -> None:
        self.context, self.best, self.count = context, 0.0, 0
        log(context, "start")

    async def call(self, number: float) -> Answer:
        """Submits an answer.

        Args:
            number: The answer.
        """
        await asyncio.sleep(0)
        self.count += 1
        progress = max(number - self.best, 0.0)
        self.best += progress
        log(self.context, f"call {number:g}")
        return Answer(f"submission {self.count}, best {self.best:g}", reward=progress)

    async def reward(self) -> float:
        return -0.125 * self.count

    def end(self) -> None:
        log(self.context, "end")


@tool
class fragile:
    """Fails in the way that its argument names."""

    def start(self, context: Context) -> None:
        self.context = context
        if context.extra_info.get("no_start"):
            raise FileNotFoundError("no index")

    def call(self, how: str) -> str:
        """Fails.

        Args:
            how: The failure.
        """
        log(self.context, f"call {how}")
        if how == "hang":
            time.sleep(60)
        if how == "slow":
            time.sleep(1.0)
        if how == "exit":
            os._exit(3)
        if how == "absent":
            raise ToolUnavailable("the index is being rebuilt")
        if how == "raise":
            raise ValueError(how)
        return str(os.getpid())

    def reward(self) -> float:
        return float(self.context.extra_info.get("final", 0.0))

    def end(self) -> None:
        log(self.context, "end fragile")
        if self.context.extra_info.get("no_end"):
            raise OSError("the session was gone")
