"""One sample of an agent loop: turn by turn, until the policy calls no tool and no interaction answers, or at a limit.

Sampled tokens are kept as they are. The chat template writes the tokens between two turns, which are not trained on
(`loss_mask`). Nothing is tokenized twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megarl.agents import Context, ToolUnavailable
from megarl.agents.call_formats import ToolCall, calls_in
from megarl.agents.tool_responses import AnswerTokens, ReplyTokens
from megarl.agents.toolbox import SampleCaller, ToolAnswer, Toolbox, refused
from megarl.cluster.outages import wait_before
from megarl.data.images import joined
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.agent import AgentConfig
from megarl.types import (
    Completion,
    DraftCount,
    FailureKind,
    GenerationRequest,
    Prompt,
    PromptImage,
    SampleFailure,
    SampleImages,
    Span,
    ToolUse,
    Turn,
    derived_seed,
)

_HEAD = 16  # tokens before a turn, in which a template may open <think>
SampleTurn = Callable[[GenerationRequest], Awaitable[Completion]]
"""Samples one turn; `sampling.n` is 1, and the prompt holds all earlier tokens."""


@dataclass(frozen=True)
class Trajectory:
    """The result of one sample; vectors cover the response, [R]."""

    tokens: np.ndarray  # int32 [R]
    log_probs: np.ndarray  # float32 [R]; 0 for tokens between turns
    sampled: np.ndarray  # bool [R]: tokens of the policy's turns
    turns: tuple[Turn, ...]
    ends: tuple[int, ...]  # index in the response after the last token of each policy turn
    finish_reason: str
    routed_experts: np.ndarray | None = None  # int16 [prompt + R, layers, topk]
    images: SampleImages | None = None  # of the prompt and of tools' answers; None: only the prompt's, if any
    failure: SampleFailure | None = None  # a tool was unavailable, and the sample ended early
    sampled_again: tuple[FailureKind, ...] = ()  # causes of failures after which it was sampled again from its start
    spans: tuple[Span, ...] = (Span(0, 0),)  # weights that sampled the response; tool tokens belong to the turn before
    drafts: DraftCount | None = None  # of the policy's turns; None: no speculative decoding
    adds_rewards: bool = True  # the turns' rewards are step rewards; otherwise only scorers see them
    # Of the user's loop alone (agents/custom/):
    prompt: tuple[int, ...] | None = None  # its tokens instead of the row's
    outcome: float | None = None  # the reward, instead of a scorer's
    extra_info: dict[str, Any] = field(default_factory=dict)  # for scorers, in addition to the row's

    @property
    def tool_use(self) -> ToolUse:
        """Counts and times of its tool calls."""
        tools = [turn for turn in self.turns if turn.role == "tool"]
        return ToolUse(
            turns=len(self.ends),
            calls=len(tools),
            failures=sum(bool(turn.failure) for turn in tools),
            timeouts=sum(turn.failure == "timeout" for turn in tools),
            seconds=sum(turn.seconds for turn in self.turns),
        )

    @classmethod
    def of(cls, completion: Completion, text: str) -> Trajectory:
        """Return a sample of one turn, without tools. `text`: the decoded completion."""
        length = len(completion.tokens)
        return cls(
            tokens=completion.tokens.astype(np.int32),
            log_probs=completion.log_probs.astype(np.float32),
            sampled=np.ones(length, bool),
            turns=(Turn("assistant", text, length),),
            ends=(length,),
            finish_reason=completion.finish_reason,
            routed_experts=completion.routed_experts,
            spans=completion.spans,
            drafts=completion.drafts,
        )

    @classmethod
    def failed(cls, failure: SampleFailure) -> Trajectory:
        """Return an empty sample for a prompt that could not be prepared."""
        empty = np.zeros(0)
        vectors = empty.astype(np.int32), empty.astype(np.float32), empty.astype(bool)
        return cls(*vectors, turns=(), ends=(), finish_reason="failed", failure=failure)


@dataclass
class _Written:
    """The response so far."""

    tokens: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    drafts: DraftCount | None = None
    images: SampleImages | None = None  # of the prompt and the response
    length: int = 0

    def add(self, tokens: np.ndarray, log_probs: np.ndarray | None) -> None:
        """Append tokens. `log_probs` is None for tokens that the policy did not sample."""
        self.tokens.append(tokens.astype(np.int32))
        self.log_probs.append(np.zeros(len(tokens), np.float32) if log_probs is None else log_probs)
        self.sampled.append(np.full(len(tokens), log_probs is not None))
        self.length += len(tokens)


class SampleLoop(Protocol):
    """Makes the samples of a run, any number at once."""

    begins_with_prompt: bool  # the first turn of a sample continues the row's prompt

    async def run(self, request: GenerationRequest, first: Awaitable[Completion], sample: SampleTurn) -> Trajectory: ...


async def sampled_until_complete(attempts: int, attempt: Callable[[int], Awaitable[Trajectory]]) -> Trajectory:
    """Return a sample of `attempt`, which gets the number of earlier failures; a failed one after `attempts` failures."""
    failures: list[SampleFailure] = []
    while True:
        done = await attempt(len(failures))
        if done.failure is None:
            break
        failures.append(done.failure)
        if len(failures) == attempts:
            total = sum(failure.attempts for failure in failures)
            done = replace(done, failure=replace(failures.pop(), attempts=total))
            break
        await asyncio.sleep(wait_before(len(failures) - 1))
    return replace(done, sampled_again=tuple(failure.kind for failure in failures))


class AgentLoop:
    """Runs samples with tools, any number at once."""

    begins_with_prompt = True

    def __init__(
        self,
        settings: AgentConfig,
        format: str | None,
        tokenizer: Tokenizer,
        answers: AnswerTokens | None,
        tools: Toolbox,
        replies: ReplyTokens | None = None,
    ) -> None:
        """`format`, `answers`: None without tools that the policy calls. `replies`: None without an interaction."""
        self.settings, self.format, self.tokenizer = settings, format, tokenizer
        self.answers, self.tools, self.replies = answers, tools, replies
        self._marks = _message_marks(tokenizer)

    async def run(self, request: GenerationRequest, first: Awaitable[Completion], sample: SampleTurn) -> Trajectory:
        """Run a sample to its end, from its first turn `first` on; `sample` samples later turns (`sampling.n` is 1).

        A sample that fails because of a tool is sampled again from its start, with the same seeds. Raises what `sample` raises.
        """

        def attempt(failures: int) -> Awaitable[Trajectory]:
            return self._attempt(request, sample(request) if failures else first, sample)

        return await sampled_until_complete(self.settings.attempts, attempt)

    async def _attempt(
        self, request: GenerationRequest, first: Awaitable[Completion], sample: SampleTurn
    ) -> Trajectory:
        """Run a sample once. The state of its tools is released in any case."""
        prompt = request.prompt
        context = Context(prompt.uid, prompt.ground_truth, prompt.extra_info, request.group)
        state = self.tools.open_sample(context)
        try:
            return await self._run(request, first, sample, context, state)
        finally:
            if state is not None:
                state.release()

    async def _run(
        self,
        request: GenerationRequest,
        first: Awaitable[Completion],
        sample: SampleTurn,
        context: Context,
        state: SampleCaller | None,
    ) -> Trajectory:
        written, left = _Written(images=request.images), self.settings.max_tool_seconds
        experts: np.ndarray | None = None
        failure: SampleFailure | None = None
        completion = await first
        while True:
            experts = _with_experts(experts, completion.routed_experts)
            calls = await asyncio.to_thread(self._take, request, written, completion)
            reason = self._limit(written, completion, calls, left)
            if reason:
                break
            try:
                shown: tuple[PromptImage, ...] = ()
                if calls:
                    answers, between, shown = await self._answer(calls, context, left, state)
                else:
                    answers, between = await self._reply(request.prompt, written, context, left, state)
            except ToolUnavailable as error:
                failure = _failure(error, context)
                break
            left -= sum(turn.seconds for turn in answers)
            room = request.sampling.max_tokens - written.length - len(between)
            if not between or room < 1:  # the last token of a sample must be a sampled one
                written.turns += answers
                reason = "length" if between else completion.finish_reason
                break
            try:
                images = await asyncio.to_thread(self.answers.prepare, shown) if self.answers and shown else None
            except ToolUnavailable as error:
                failure = _failure(error, context)
                break
            shares = [len(between) // len(answers) + (n < len(between) % len(answers)) for n in range(len(answers))]
            written.turns += [replace(turn, tokens=share) for turn, share in zip(answers, shares, strict=True)]
            written.images = joined(written.images, images, len(request.prompt.tokens) + written.length)
            written.add(np.array(between), None)
            completion = await sample(_next_request(request, written, room))
        if failure is None and state is not None:
            failure = await self._finish(state, written, context)
        return Trajectory(
            tokens=np.concatenate(written.tokens),
            log_probs=np.concatenate(written.log_probs),
            sampled=np.concatenate(written.sampled),
            turns=tuple(written.turns),
            ends=tuple(written.ends),
            finish_reason="failed" if failure is not None else reason,
            routed_experts=experts,
            images=written.images,
            failure=failure,
            spans=tuple(written.spans),
            drafts=written.drafts,
            adds_rewards=self.settings.tool_rewards == "steps",
        )

    async def _finish(self, state: SampleCaller, written: _Written, context: Context) -> SampleFailure | None:
        """End the tools with state, and add their rewards to the policy's last turn; returns a failure of a tool."""
        try:
            reward = await state.finish(self.settings.tool_rewards == "steps")
        except ToolUnavailable as error:
            return _failure(error, context)
        last = max(index for index, turn in enumerate(written.turns) if turn.role == "assistant")
        written.turns[last] = replace(written.turns[last], reward=reward)
        return None

    def _take(self, request: GenerationRequest, written: _Written, completion: Completion) -> list[ToolCall]:
        """Append the policy's turn, with its weight versions, and return its tool calls."""
        ids = completion.tokens.tolist()
        before = written.tokens[-1].tolist() if written.tokens else request.prompt.tokens
        head = self._template_head(before[-_HEAD:])
        for span in completion.spans:
            if not written.spans or span.version != written.spans[-1].version:
                written.spans.append(Span(written.length + span.start, span.version))
        written.add(completion.tokens, completion.log_probs.astype(np.float32))
        written.turns.append(Turn("assistant", self.tokenizer.decode(ids), tokens=len(ids)))
        written.ends.append(written.length)
        if completion.drafts is not None:
            written.drafts = (written.drafts or DraftCount()) + completion.drafts
        if completion.finish_reason != "stop" or self.format is None:  # truncated: a call may be incomplete
            return []
        return calls_in(self.tokenizer.decode(ids, special=True), self.format, head)

    def _template_head(self, ids: Sequence[int]) -> str:
        """Return the text after the last token that closes or heads a message: without the message, which may mention <think>."""
        start = max((place + 1 for place, token in enumerate(ids) if token in self._marks), default=0)
        return self.tokenizer.decode(ids[start:], special=True)

    def _limit(self, written: _Written, completion: Completion, calls: list[ToolCall], seconds_left: float) -> str:
        """Return the reason to end the sample here, or "" to continue."""
        if not calls and (self.replies is None or completion.finish_reason != "stop"):
            return completion.finish_reason
        if len(written.ends) >= self.settings.max_turns:
            return "turns"
        return "tool_time" if seconds_left <= 0 else ""

    async def _answer(
        self, calls: list[ToolCall], context: Context, seconds_left: float, state: SampleCaller | None
    ) -> tuple[list[Turn], list[int], tuple[PromptImage, ...]]:
        """Make the calls of one turn concurrently; returns their tool turns, in the order of the calls, the tokens up to the
        policy's next turn, and the answers' images, with starts relative to the first of these tokens."""
        assert self.answers is not None, "no tool can be called"
        most, tokens = self.settings.max_calls_per_turn, self.answers
        tool_answers: list[ToolAnswer] = []
        for answer in await asyncio.gather(
            *(self.tools.call(call, context, seconds_left, state) for call in calls[:most]), return_exceptions=True
        ):
            if isinstance(answer, BaseException):  # raised when all calls have ended
                raise answer
            tool_answers.append(answer)
        problem = f"a turn may make {most} calls; this one was not made"
        tool_answers += [ToolAnswer(refused(call, problem)) for call in calls[most:]]

        def read() -> tuple[list[Turn], list[int], tuple[PromptImage, ...]]:
            images = [tokens.read(answer) for answer in tool_answers]
            turns = [replace(answer.turn, text=tokens.shown(answer.turn.text)) for answer in tool_answers]
            return turns, *tokens.with_images([(turn.name, turn.text) for turn in turns], images)

        return await asyncio.to_thread(read)

    async def _reply(
        self, prompt: Prompt, written: _Written, context: Context, seconds_left: float, state: SampleCaller | None
    ) -> tuple[list[Turn], list[int]]:
        """Return the interaction's reply to the last turn, and the tokens up to the policy's next turn: none after the last one."""
        assert self.replies is not None, "the recipe has no interaction"
        tokens = self.replies
        messages = [*prompt.messages, *({"role": turn.role, "content": turn.text} for turn in written.turns)]
        reply, ends = await self.tools.reply(messages, context, seconds_left, state)
        if ends:
            return [reply], []
        reply = replace(reply, text=await asyncio.to_thread(tokens.shown, reply.text))
        return [reply], await asyncio.to_thread(tokens.tokens, reply.text)


def _message_marks(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that close or head a message in a chat template: special and added ones except <think> and </think>."""
    ids, added = tokenizer.tokens(), tokenizer.added_tokens()
    thoughts = {ids[token] for token in added if "think>" in token}
    return (tokenizer.end_ids | {ids[token] for token in added}) - thoughts


def _failure(error: ToolUnavailable, context: Context) -> SampleFailure:
    return SampleFailure(error.source, context.uid, error.kind, str(error), error.failures)


def turn_seed(seed: int | None, turn: int) -> int | None:
    """Return the seed of turn number `turn`, from 0: the sample's seed for the first, derived ones after it; None without seeds."""
    if turn == 0 or seed is None:
        return seed
    return derived_seed(seed, turn)


def _next_request(request: GenerationRequest, written: _Written, room: int) -> GenerationRequest:
    prompt = request.prompt
    tokens = (*prompt.tokens, *np.concatenate(written.tokens).tolist())
    return replace(
        request,
        prompt=Prompt(prompt.uid, tokens, prompt.text, prompt.data_source),
        images=written.images,
        sampling=replace(request.sampling, max_tokens=room),
        seed=turn_seed(request.seed, len(written.ends)),
    )


def _with_experts(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Return routed experts [tokens, layers, topk]; a token keeps the experts of the turn that first computed it."""
    if earlier is None or later is None:
        return later
    missing = (earlier == -1).all(axis=(1, 2))
    return np.concatenate([np.where(missing[:, None, None], later[: len(earlier)], earlier), later[len(earlier) :]])
