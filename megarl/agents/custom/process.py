"""The process of one sample: it runs the user's loop until the loop waits for the engine, and again when the answers are there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import traceback
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from megarl.agents.custom.find import find_loop
from megarl.agents.custom.interface import AgentLoopClass, LoopSample, Response, Sampled
from megarl.agents.custom.messages import Finished, LoopRequest, SampleFacts, Wanted
from megarl.agents.tool import ToolFault, ToolUnavailable
from megarl.agents.tool_process import UnavailableNow
from megarl.agents.tool_responses import ReplyTokens
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.subprocess_pool.job import Job

WORK = f"{__name__}:loop_job"
_SETTLE = 20  # rounds of the event loop in which concurrent parts of a loop add their requests
_END_SECONDS = 5.0  # for a loop to end that is cancelled

Answer = list[Wanted] | Finished | UnavailableNow


def loop_job(path: str, settings: dict[str, Any]) -> Job:
    """Return the job of a sample's process. `settings`: see `LoopPool`."""
    tokenizer = load_tokenizer(settings["tokenizer"], chat_template=settings["chat_template"])
    loop = find_loop(path, settings["arguments"], settings["verl"], tokenizer)

    @functools.cache
    def replies() -> ReplyTokens:
        return ReplyTokens(tokenizer, settings["template_args"], settings["max_answer_tokens"])

    def reply_tokens(text: str) -> list[int]:
        return replies().tokens(replies().shown(text))

    return Job(LoopProcess(loop, tokenizer, reply_tokens).run)


class LoopProcess:
    """Runs the loop of one sample, in steps."""

    def __init__(self, loop: AgentLoopClass, tokenizer: Tokenizer, reply_tokens: Callable[[str], list[int]]) -> None:
        self._loop, self._tokenizer, self._reply_tokens = loop, tokenizer, reply_tokens
        self._task: asyncio.Task[Finished] | None = None
        self._requests: _Requests

    async def run(self, request: LoopRequest) -> Answer:
        """Return the loop's new requests, all of which must be answered in the next step; its response; or why it failed."""
        if request.step == "end":
            await self._end()
            return []
        if request.step == "begin":
            assert request.facts is not None
            self._requests = _Requests()
            sample = _Sample(request.facts, self._tokenizer, self._reply_tokens, self._requests)
            self._task = asyncio.get_running_loop().create_task(self._made(sample))
        self._requests.answer(request.answers)
        assert self._task is not None
        new_request = asyncio.get_running_loop().create_task(self._requests.asked.wait())
        try:
            await asyncio.wait({self._task, new_request}, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(_SETTLE):
                if self._task.done():
                    break
                await asyncio.sleep(0)
        finally:
            new_request.cancel()
        return self._result(self._task) if self._task.done() else self._requests.take()

    async def _made(self, sample: LoopSample) -> Finished:
        return finished(await self._loop.create(sample).run(sample))

    def _result(self, task: asyncio.Task[Finished]) -> Finished | UnavailableNow:
        if task.cancelled():
            return UnavailableNow("it was cancelled", is_outage=False)
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, ToolUnavailable):
            return UnavailableNow(str(error), error.is_outage)
        return UnavailableNow(f"{type(error).__name__}: {error}{_place(error)}", is_outage=False)

    async def _end(self) -> None:
        """Cancel a loop that runs, so that it can release what it has acquired. Errors go to the engine's log."""
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_END_SECONDS)
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            traceback.print_exception(error)


class _Requests:
    """Requests of a loop that the engine has not answered."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._new: list[Wanted] = []
        self._open: dict[int, asyncio.Future[Sampled]] = {}
        self._count = 0

    async def ask(self, tokens: tuple[int, ...], max_tokens: int | None, settings: dict[str, float]) -> Sampled:
        number, self._count = self._count, self._count + 1
        self._open[number] = asyncio.get_running_loop().create_future()
        self._new.append(Wanted(number, tokens, max_tokens, settings))
        self.asked.set()
        return await self._open[number]

    def take(self) -> list[Wanted]:
        requests, self._new = self._new, []
        self.asked.clear()
        return requests

    def answer(self, answers: Any) -> None:
        for number, sampled in answers.items():
            future = self._open.pop(number)
            if not future.done():  # else the loop has cancelled it
                future.set_result(sampled)


class _Sample(LoopSample):
    def __init__(
        self, facts: SampleFacts, tokenizer: Tokenizer, reply_tokens: Callable[[str], list[int]], requests: _Requests
    ) -> None:
        self.prompt, self.messages, self.context = facts.prompt, facts.messages, facts.context
        self.data_source, self.sampling, self.tokenizer = facts.data_source, facts.sampling, tokenizer
        self._reply, self._requests = reply_tokens, requests

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> Sampled:
        settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        chosen = {name: value for name, value in settings.items() if value is not None}
        return await self._requests.ask(as_tokens(tokens, "generate"), max_tokens, chosen)

    def reply_tokens(self, text: str) -> list[int]:
        return self._reply(text)


def finished(response: Any) -> Finished:
    """Check a loop's result. Raises ToolFault if it is not a valid `Response`."""
    if not isinstance(response, Response):
        raise ToolFault(f"its method run returned {response!r:.200} ({type(response).__name__}), not a Response")
    reward = response.reward
    if reward is not None and (not isinstance(reward, (Real, np.bool_)) or not math.isfinite(reward)):
        raise ToolFault(f"the reward of its response is {reward!r}, not a finite number")
    try:
        extra_info = json.loads(json.dumps(response.extra_info, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ToolFault(f"extra_info of its response has other values than JSON's: {error}") from error
    if not isinstance(extra_info, dict):
        raise ToolFault(f"extra_info of its response is {response.extra_info!r:.200}, not a dict")
    return Finished(
        tokens=as_tokens(response.tokens, "its response"),
        mask=tuple(bool(entry) for entry in response.mask),
        prompt=None if response.prompt is None else as_tokens(response.prompt, "the prompt of its response"),
        reward=None if reward is None else float(reward),
        extra_info=extra_info,
    )


def as_tokens(tokens: Any, place: str) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises ToolFault for other values."""
    values = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    with contextlib.suppress(TypeError):
        values = tuple(values)
        if all(isinstance(value, Integral) for value in values):
            return tuple(int(value) for value in values)
    raise ToolFault(f"{place}: token ids are expected, not {tokens!r:.200}")


def _place(error: BaseException) -> str:
    """Return the line of the user's file in which an error was raised."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/megarl/agents/custom/" not in frame.filename
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
