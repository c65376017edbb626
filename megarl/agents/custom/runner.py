"""Samples of the user's agent loop, in a rollout process: each has a process, and the engine answers its requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from megarl.agents.custom.interface import Sampled
from megarl.agents.custom.messages import Finished, LoopRequest, SampleFacts, Wanted
from megarl.agents.custom.process import WORK
from megarl.agents.custom.record import EngineAnswer, Matched, match
from megarl.agents.tool import Context, ToolFault, ToolUnavailable
from megarl.agents.tool_process import UnavailableNow
from megarl.agents.trajectory import SampleTurn, Trajectory, sampled_until_complete, turn_seed
from megarl.cluster.call_gate import CallGate
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.agent import AgentConfig
from megarl.subprocess_pool.job import Failed, Outcome
from megarl.subprocess_pool.pool import ProcessPool
from megarl.subprocess_pool.process import Seat
from megarl.types import Completion, GenerationRequest, Prompt, SampleFailure, Turn

CLOSE_SECONDS = 5.0  # for loops to end when the run ends


class LoopPool:
    """The processes of a loop's samples. `path`: of `agent.loop`; `settings`: for `process.loop_job`, JSON values."""

    def __init__(self, path: str, settings: dict[str, Any], *, at_once: int, timeout: float) -> None:
        """`at_once`: most loops that run at the same time. `timeout`: most seconds between two requests of a loop."""
        self.path = path
        self.places = asyncio.Semaphore(at_once)
        self._ending: set[concurrent.futures.Future[Outcome]] = set()
        self._running: set[Seat] = set()
        self._pool = ProcessPool(
            WORK, [path], settings, processes=0, timeout=timeout, retries=0, timeout_key="agent.tool_timeout"
        )

    def start(self) -> None:
        """Wait until loops can run. Raises RuntimeError if the class cannot be imported."""
        self._pool.start()

    async def run(self, seat: Seat, request: LoopRequest, timeout: float) -> Outcome:
        async with self.places:
            self._running.add(seat)  # from here on it has a process, which `end` ends
            return await asyncio.wrap_future(self._pool.submit(self.path, request, timeout, seat=seat))

    def end(self, seat: Seat) -> None:
        """End a sample's process, without waiting for it."""
        if seat not in self._running:
            return
        self._running.discard(seat)
        try:
            ending = self._pool.submit(self.path, LoopRequest("end"), seat=seat, last=True)
        except RuntimeError:  # the pool is closed
            return
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def close(self) -> None:
        """End every process."""
        for seat in list(self._running):
            self.end(seat)
        concurrent.futures.wait(list(self._ending), CLOSE_SECONDS)
        self._pool.close()


@dataclass
class _Progress:
    """A sample so far. seconds: run time of the loop, without the engine's."""

    records: list[EngineAnswer] = field(default_factory=list)
    seconds: float = 0.0
    refused: Literal["", "turns", "length"] = ""  # the finish reason of a request that was not made


class CustomLoop:
    """Runs samples with the user's loop, any number at once."""

    begins_with_prompt = False

    def __init__(
        self, settings: AgentConfig, title: str, tokenizer: Tokenizer, pool: LoopPool, max_prompt: int, gate: CallGate
    ) -> None:
        """`title`: the loop's name for messages. `max_prompt`: tokens of a prompt. `gate`: of the services behind the loop."""
        self.settings, self.title, self.tokenizer = settings, title, tokenizer
        self.pool, self.max_prompt, self.gate = pool, max_prompt, gate

    async def run(self, request: GenerationRequest, first: Awaitable[Completion], sample: SampleTurn) -> Trajectory:
        """Run a sample to its end; `sample` makes the loop's requests. `first` is not used: the loop chooses its first request.

        A sample that fails is sampled again from its start, with the same seeds. Raises what `sample` raises.
        """
        return await sampled_until_complete(self.settings.attempts, lambda _: self._attempt(request, sample))

    async def _attempt(self, request: GenerationRequest, sample: SampleTurn) -> Trajectory:
        uid = request.prompt.uid
        try:
            done, _ = await self.gate.call(uid, lambda: self._once(request, sample), 1)
        except ToolUnavailable as error:
            return Trajectory.failed(SampleFailure(self.title, uid, error.kind, str(error), error.failures))
        return done

    async def _once(self, request: GenerationRequest, sample: SampleTurn) -> Trajectory:
        """Run a sample once, and end its process in any case. Raises ToolUnavailable if the loop fails."""
        prompt, seat, progress = request.prompt, Seat(), _Progress()
        context = Context(prompt.uid, prompt.ground_truth, prompt.extra_info, request.group)
        facts = SampleFacts(prompt.tokens, prompt.messages, context, prompt.data_source, request.sampling)
        step = LoopRequest("begin", facts)
        try:
            while True:
                answer = await self._step(seat, step, progress)
                if isinstance(answer, Finished):
                    return await asyncio.to_thread(self._trajectory, request, answer, progress)
                # Check all before one is sampled: an invalid one ends the attempt, and the others would go on in the engine.
                checked = [(each, self._checked(request, each, progress)) for each in answer]
                replies = await asyncio.gather(
                    *(
                        self._generate(each, engine_request, request, progress, sample)
                        for each, engine_request in checked
                    )
                )
                step = LoopRequest("continue", answers=dict(replies))
        finally:
            self.pool.end(seat)

    async def _step(self, seat: Seat, step: LoopRequest, progress: _Progress) -> list[Wanted] | Finished:
        """Run the loop until it waits for the engine or returns. Raises ToolUnavailable."""
        left = self.settings.max_tool_seconds - progress.seconds
        if left <= 0:
            limit = self.settings.max_tool_seconds
            raise ToolFault(f"it ran for longer than {limit:g} s in all (agent.max_tool_seconds)", "timeout")
        done = await self.pool.run(seat, step, left)
        progress.seconds += done.seconds
        if isinstance(done, Failed):
            raise ToolFault(done.cause, done.kind)
        if isinstance(done.value, UnavailableNow):
            raise done.value.exception()
        answer: list[Wanted] | Finished = done.value
        return answer

    def _checked(
        self, request: GenerationRequest, wanted: Wanted, progress: _Progress
    ) -> GenerationRequest | Literal["length", "turns"]:
        """Return a loop's request for the engine, or the limit that prevents it. Raises ToolFault for an invalid request."""
        limit = self._room(request, wanted, progress)
        if wanted.number >= self.settings.max_turns or limit < 1:
            progress.refused = "length" if limit < 1 else "turns"
            return progress.refused
        for name, value in wanted.settings.items():
            if not _is_valid(name, value):
                raise ToolFault(
                    f"its request {wanted.number} asks for {name}={value!r}, which the engine does not know"
                )
        changes: dict[str, Any] = dict(wanted.settings)
        prompt = request.prompt
        return replace(
            request,
            prompt=Prompt(prompt.uid, wanted.tokens, prompt.text, prompt.data_source),
            sampling=replace(request.sampling, max_tokens=limit, **changes),
            seed=turn_seed(request.seed, wanted.number),
        )

    async def _generate(
        self,
        wanted: Wanted,
        checked: GenerationRequest | Literal["length", "turns"],
        request: GenerationRequest,
        progress: _Progress,
        sample: SampleTurn,
    ) -> tuple[int, Sampled]:
        """Return the number of a request and the engine's answer, which is recorded. `checked`: from `_checked`."""
        if not isinstance(checked, GenerationRequest):
            return wanted.number, Sampled((), (), checked)
        answer = await sample(checked)
        changed = {name: value for name, value in wanted.settings.items() if value != getattr(request.sampling, name)}
        differs = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        progress.records.append(EngineAnswer(np.array(wanted.tokens, np.int32), answer, differs))
        tokens, log_probs = tuple(answer.tokens.tolist()), tuple(answer.log_probs.tolist())
        return wanted.number, Sampled(tokens, log_probs, answer.finish_reason, answer.spans)  # type: ignore[arg-type]

    def _room(self, request: GenerationRequest, wanted: Wanted, progress: _Progress) -> int:
        """Return how many tokens the engine may sample. Raises ToolFault for a request that cannot be made.

        A model may sample token ids that its tokenizer lacks; a request may contain them.
        """
        count, most, vocabulary = len(wanted.tokens), request.sampling.max_tokens, self.tokenizer.vocab_size
        if not count:
            raise ToolFault(f"its request {wanted.number} has no tokens")
        foreign = {token for token in wanted.tokens if not 0 <= token < vocabulary}
        if foreign and not foreign <= {token for each in progress.records for token in each.completion.tokens.tolist()}:
            raise ToolFault(f"its request {wanted.number} has token ids outside 0 to {vocabulary - 1}")
        if wanted.max_tokens is not None and not (isinstance(wanted.max_tokens, int) and wanted.max_tokens >= 1):
            raise ToolFault(f"its request {wanted.number} asks for max_tokens={wanted.max_tokens!r}: give at least 1")
        prompt = request.prompt.tokens
        extends = wanted.tokens[: len(prompt)] == prompt
        room = min(most, (len(prompt) if extends else self.max_prompt) + most - count)
        return room if wanted.max_tokens is None else min(room, wanted.max_tokens)

    def _trajectory(self, request: GenerationRequest, done: Finished, progress: _Progress) -> Trajectory:
        """Check a response against the records. Raises ToolFault if it cannot be trained on."""
        prompt = request.prompt.tokens if done.prompt is None else done.prompt
        if not 0 < len(prompt) <= self.max_prompt:
            raise ToolFault(
                f"the prompt of its response has {len(prompt)} tokens, and data.max_prompt_length is {self.max_prompt}"
            )
        matched = match(prompt, done.tokens, done.mask, progress.records, request.sampling.max_tokens)
        reason = matched.finish_reason
        return Trajectory(
            tokens=matched.tokens,
            log_probs=matched.log_probs,
            sampled=matched.sampled,
            turns=self._turns(matched, progress.seconds),
            ends=matched.ends,
            finish_reason=progress.refused if progress.refused and reason == "stop" else reason,
            spans=matched.spans,
            prompt=None if prompt == request.prompt.tokens else prompt,
            outcome=done.reward,
            extra_info=done.extra_info,
        )

    def _turns(self, matched: Matched, seconds: float) -> tuple[Turn, ...]:
        """Return runs of tokens with and without loss as turns; the last one has the loop's run time."""
        borders = [0, *(np.flatnonzero(np.diff(matched.sampled)) + 1).tolist(), len(matched.tokens)]
        turns = []
        for start, end in itertools.pairwise(borders):
            text = self.tokenizer.decode(matched.tokens[start:end].tolist())
            turns.append(Turn("assistant" if matched.sampled[start] else "user", text, tokens=end - start))
        return (*turns[:-1], replace(turns[-1], seconds=seconds))


def _is_valid(name: str, value: Any) -> bool:
    """Return whether an engine accepts a setting: an invalid one must not end the run."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    if name == "top_k":
        return isinstance(value, int) and (value == -1 or value >= 1)
    return value >= 0 if name == "temperature" else 0 < value <= 1
