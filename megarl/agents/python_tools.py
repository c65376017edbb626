"""Python tools in processes that can be killed. Tools with state have a process for each sample that calls one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from collections.abc import Mapping
from typing import Any

from megarl.agents import Answer, Context, ToolUnavailable, find
from megarl.agents.tool import ToolFault
from megarl.agents.tool_process import WORK, ToolException, ToolRequest, UnavailableNow
from megarl.agents.toolbox import CallOutcome
from megarl.subprocess_pool.job import Outcome
from megarl.subprocess_pool.pool import Failed, ProcessPool
from megarl.subprocess_pool.process import Seat

CLOSE_SECONDS = 5.0  # for tools with state to end when the run ends
_STATE_LOST = "it was stopped or crashed earlier, and cannot be called again"


class PythonTools:
    """A `Caller` with worker processes. `paths`: tool name -> registered name or path, see `find`."""

    def __init__(self, paths: Mapping[str, str], settings: dict[str, Any], *, processes: int, timeout: float) -> None:
        self._paths, self._timeout = dict(paths), timeout
        self._samples: set[SampleProcess] = set()  # not released yet
        self._ending: set[concurrent.futures.Future[Outcome]] = set()
        self._places = asyncio.Semaphore(processes)  # of calls of tools with state
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
        """End the tools with state, then every process."""
        for sample in list(self._samples):
            sample.release()
        concurrent.futures.wait(list(self._ending), CLOSE_SECONDS)
        self._pool.close()

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        request = ToolRequest(arguments, context)
        done = await asyncio.wrap_future(self._pool.submit(self._paths[name], request, timeout))
        return _outcome(done, timeout)

    def open_sample(self, context: Context) -> SampleProcess:
        """Return the caller of a sample's tools with state. The sample must end with `release`."""
        return SampleProcess(self, context)


class SampleProcess:
    """A `SampleCaller` with a process that starts with the sample's first call, and is killed with its state when a call reaches
    the time limit. Calls of the sample run one after the other."""

    def __init__(self, tools: PythonTools, context: Context) -> None:
        self._tools, self._context, self._seat = tools, context, Seat()
        self._started: list[str] = []  # names of tools that have been called and not ended
        self._lost = False
        self._order = asyncio.Lock()

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallOutcome:
        async with self._order, self._tools._places:
            if self._lost:
                return CallOutcome(Answer(f"Error: {_STATE_LOST}"), 0.0, "crash")
            if name not in self._started:
                self._started.append(name)
                self._tools._samples.add(self)
            done = await asyncio.wrap_future(self._submit(name, ToolRequest(arguments, self._context), timeout))
            self._lost = isinstance(done, Failed) and done.kind != "error"
        return _outcome(done, timeout)

    async def finish(self, with_rewards: bool) -> float:
        """End the tools, and return the sum of their rewards; a tool that lost its state has reward 0. Raises ToolUnavailable."""
        reward = 0.0
        while self._started and not self._lost:
            name = self._started.pop(0)
            request = ToolRequest({}, self._context, "reward" if with_rewards else "end")
            done = await asyncio.wrap_future(self._submit(name, request, last=not self._started))
            problem = _problem_of(done)
            if problem is not None:
                problem.source = find(self._tools._paths[name]).title
                raise problem
            reward += done.value.reward  # type: ignore[union-attr]
        return reward

    def release(self) -> None:
        """End the tools that `finish` has not ended, without waiting for them. Failures go to the engine's log."""
        self._tools._samples.discard(self)
        while self._started and not self._lost:
            name = self._started.pop(0)
            request = ToolRequest({}, self._context, "end")
            try:
                ending = self._submit(name, request, last=not self._started)
            except RuntimeError:
                return
            self._tools._ending.add(ending)
            ending.add_done_callback(lambda done, name=name: self._released(name, done))  # type: ignore[misc]

    def _released(self, name: str, done: concurrent.futures.Future[Outcome]) -> None:
        self._tools._ending.discard(done)
        problem = done.exception() or _problem_of(done.result())
        if problem is not None:
            title = find(self._tools._paths[name]).title
            print(f"{title}, sample {self._context.sample} of {self._context.uid}: {problem}", file=sys.stderr)

    def _submit(
        self, name: str, request: ToolRequest, timeout: float | None = None, last: bool = False
    ) -> concurrent.futures.Future[Outcome]:
        tools = self._tools
        return tools._pool.submit(tools._paths[name], request, timeout, seat=self._seat, last=last)


def _outcome(done: Outcome, timeout: float) -> CallOutcome:
    """Return the result of a policy's call. Raises ToolUnavailable."""
    if isinstance(done, Failed):
        return CallOutcome(Answer(_failure_text(done, timeout)), done.seconds, done.kind)
    if isinstance(done.value, UnavailableNow):
        raise done.value.exception()
    if isinstance(done.value, ToolException):
        return CallOutcome(Answer(f"Error: {done.value.text}"), done.seconds, "error")
    return CallOutcome(done.value, done.seconds)


def _problem_of(done: Outcome) -> ToolUnavailable | None:
    """Return why tools could not end; None if they have ended."""
    if isinstance(done, Failed):
        return ToolFault(f"its end failed: {done.cause}", done.kind)
    return done.value.exception() if isinstance(done.value, UnavailableNow) else None


def _failure_text(failed: Failed, timeout: float) -> str:
    """Describe a failure of the process to the policy."""
    if failed.kind == "timeout":
        return f"Error: it was stopped after {timeout:g} seconds"
    return "Error: it crashed" if failed.kind == "crash" else f"Error: {failed.cause}"
