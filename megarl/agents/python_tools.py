"""Python tools in processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megarl.agents import Answer, Context, ToolUnavailable, find
from megarl.agents.toolbox import CallOutcome
from megarl.agents.worker import ToolException, ToolRequest, UnavailableNow, caller_of
from megarl.subprocess_pool.job import Job
from megarl.subprocess_pool.pool import Failed, ProcessPool

WORK = "megarl.agents.python_tools:tool_job"


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
