"""Python tools in processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megarl.agents import Answer, Context, ToolUnavailable, find
from megarl.agents.toolbox import Outcome
from megarl.agents.worker import Raised, ToolRequest, Unavailable, caller_of
from megarl.subprocess_pool.job import Job
from megarl.subprocess_pool.pool import Failed, ProcessPool

WORK = "megarl.agents.python_tools:tool_job"


def tool_job(path: str, settings: dict[str, Any]) -> Job:
    """What a process does for the tool `path`, a registered name or module:function."""
    tool = find(path)
    prepare = tool.prepare
    return Job(caller_of(tool), (lambda: prepare(settings)) if prepare else None)


class PythonTools:
    """A `Caller`. `paths`: by the name of each tool, where it is found."""

    def __init__(self, paths: Mapping[str, str], settings: dict[str, Any], *, processes: int, timeout: float) -> None:
        self._paths, self._timeout = dict(paths), timeout
        self._pool = ProcessPool(
            WORK,
            sorted(self._paths.values()),
            settings,
            processes=processes,
            timeout=timeout,
            retries=0,
            at_once=1,  # a call does not wait behind another's while a process is idle
            timeout_key="agent.tool_timeout",
        )

    def start(self) -> None:
        """Wait until tools can be called. Raises RuntimeError where one cannot be imported."""
        self._pool.start()

    def close(self) -> None:
        self._pool.close()

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> Outcome:
        request = ToolRequest(arguments, context)
        done = await asyncio.wrap_future(self._pool.submit(self._paths[name], request, timeout))
        if isinstance(done, Failed):
            return Outcome(Answer(_told(done, timeout)), done.seconds, done.kind)
        if isinstance(done.value, Unavailable):
            raise ToolUnavailable(done.value.cause)
        if isinstance(done.value, Raised):
            return Outcome(Answer(f"Error: {done.value.text}"), done.seconds, "error")
        return Outcome(done.value, done.seconds)


def _told(failed: Failed, timeout: float) -> str:
    """A failure of the process, in words for the policy."""
    if failed.kind == "timeout":
        return f"Error: it was stopped after {timeout:g} seconds"
    return "Error: it crashed" if failed.kind == "crash" else f"Error: {failed.cause}"
