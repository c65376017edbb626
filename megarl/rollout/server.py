"""A rollout process: one engine, and the scorers of what it samples.

The controller submits requests and collects groups; a group comes back scored, as control data
(lengths, rewards) beside the token vectors, so that the controller need not touch the latter.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from megarl import engines, rewards
from megarl.config.schema import RewardConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.base import EngineSpec
from megarl.exchange.session import ExchangeSession
from megarl.rewards.weighted import terms_of
from megarl.rollout.step_places import tokens_at
from megarl.scoring.pool import Outcome
from megarl.scoring.scoring import Scoring
from megarl.types import (
    Completion,
    GenerationRequest,
    Group,
    InlineData,
    Prompt,
    Sample,
    SampleTokens,
    ScoringFailure,
    Steps,
)

T = TypeVar("T")


class RolloutServer:
    """Runs inside a service process (see cluster/): async methods answer while others are in flight."""

    def __init__(self, engine: str, spec: EngineSpec, tokenizer: str, reward: RewardConfig, sources: list[str]):
        self.engine = engines.create(engine, spec)
        self.tokenizer = load_tokenizer(tokenizer)  # for text alone: stop tokens come with each request
        self.scoring = Scoring(terms_of(reward.function, reward.functions, sources), reward)
        self.texts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="texts")
        # A call to the engine blocks a thread until it is done; under continuous admission many are under way.
        self.calls = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="engine-call")
        self.version = 0  # of the weights the engine holds
        self._results: dict[int, asyncio.Future[tuple[Group, list[SampleTokens]]]] = {}
        self._settling: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    async def start(self) -> dict[str, Any]:
        """Load the engine; returns its description."""
        description = await self._in_thread(self.engine.start)
        await self._in_thread(self.scoring.start)
        return description

    async def submit(self, requests: list[GenerationRequest]) -> None:
        """Admit `requests` all at once, in their order; returns when all are sampled. Each group is to be collected."""
        loop = asyncio.get_running_loop()
        by_group = {request.group: request for request in requests}
        sampled: dict[int, list[Completion]] = {}

        def finished(group: int, completions: list[Completion]) -> None:  # in the engine's thread
            sampled[group] = completions
            own = max(group, _greedy_twin(group))
            twins = [own, _greedy_twin(own)] if by_group[own].with_greedy else [own]
            if all(twin in sampled for twin in twins):
                loop.call_soon_threadsafe(self._settle, by_group[own], [sampled.pop(twin) for twin in twins])

        everything = [one for request in requests for one in (request, *_greedy_request(request))]
        await self._in_thread(self.engine.generate, everything, finished)

    async def collect(self, group: int) -> tuple[Group, list[SampleTokens]]:
        """Wait for one submitted group: its control data and, sample by sample, its token vectors.

        Where `submit` fails the group never comes: the caller watches both.
        """
        try:
            return await self._result(group)
        finally:
            del self._results[group]

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.calls, function, *args)

    def _result(self, group: int) -> asyncio.Future[tuple[Group, list[SampleTokens]]]:
        """Calls may overtake each other on their way here, so whoever is first makes the future."""
        if group not in self._results:
            self._results[group] = asyncio.get_running_loop().create_future()
        return self._results[group]

    async def connect_exchange(self, session: ExchangeSession) -> None:
        await self._in_thread(self.engine.connect_exchange, session)

    async def update_weights(self, version: int) -> Any:
        """Receive the weights of `version` from the trainers; returns the engine's report of what arrived."""
        report = await self._in_thread(self.engine.update_weights, version)
        self.version = version
        return report

    async def sleep(self) -> None:
        await self._in_thread(self.engine.sleep)

    async def wake(self, tags: list[str]) -> None:
        await self._in_thread(self.engine.wake, tags)

    async def shutdown(self) -> None:
        await self._in_thread(self.engine.shutdown)
        await self._in_thread(self.scoring.close)
        self.texts.shutdown(wait=False)
        self.calls.shutdown(wait=False)

    def _settle(self, request: GenerationRequest, sampled: list[list[Completion]]) -> None:
        """Score a group, and its greedy twin where there is one, while others are sampled; then it can be collected."""

        async def settle() -> None:
            try:
                self._result(request.group).set_result(await self._scored(request, sampled))
            except Exception as error:  # noqa: BLE001 -- whoever collects the group is told
                self._result(request.group).set_exception(error)

        task = asyncio.get_running_loop().create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _scored(
        self, request: GenerationRequest, sampled: list[list[Completion]]
    ) -> tuple[Group, list[SampleTokens]]:
        in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, self.texts)
        everything = [completion for completions in sampled for completion in completions]
        texts = await in_thread(lambda: [self.tokenizer.decode(one.tokens.tolist()) for one in everything])
        outcomes = await self.scoring.score([_question(request.prompt, text) for text in texts])
        return await in_thread(self._group, request, len(sampled[0]), everything, texts, outcomes)

    def _group(
        self,
        request: GenerationRequest,
        count: int,
        completions: list[Completion],
        texts: list[str],
        outcomes: list[Outcome],
    ) -> tuple[Group, list[SampleTokens]]:
        """The group of the first `count` completions; one more is the greedy one."""
        prompt, together = request.prompt, list(zip(completions, texts, outcomes, strict=True))
        samples = [self._sample(request, index % count, *one) for index, one in enumerate(together)]
        failures = tuple(result for result, _ in outcomes if isinstance(result, ScoringFailure))
        group = Group(
            number=request.group,
            prompt_uid=prompt.uid,
            data_source=prompt.data_source,
            version=self.version,
            samples=samples[:count],
            greedy=samples[count] if len(samples) > count else None,
            failures=failures,
            scoring_retries=sum(repeated for _, repeated in outcomes),
        )
        return group, [_join(request, completion, text) for completion, text, _ in together[:count]]

    def _sample(
        self, request: GenerationRequest, index: int, completion: Completion, text: str, outcome: Outcome
    ) -> Sample:
        """Its control data."""
        prompt, scored = request.prompt, outcome[0]
        if isinstance(scored, ScoringFailure):
            scored = rewards.Score(math.nan)
        return Sample(
            group=request.group,
            index=index,
            data=InlineData([]),  # replaced by the caller with where the vectors lie
            prompt_length=len(prompt.tokens),
            response_length=len(completion.tokens),
            loss_tokens=len(completion.tokens),
            reward=scored.value,
            reward_parts=scored.parts,
            answer=scored.answer,
            finish_reason=completion.finish_reason,
            version=self.version,
            steps=self._steps(scored, completion, text, len(prompt.tokens)),
        )

    def _steps(self, scored: rewards.Score, completion: Completion, text: str, start: int) -> Steps:
        """Where the scored steps of a response end, in tokens of the sample, in which it begins at `start`."""
        ends = [end for end, _ in scored.steps]
        places = tokens_at(ends, completion.tokens.tolist(), text, self.tokenizer.decode)
        return tuple((start + place, reward) for place, (_, reward) in zip(places, scored.steps, strict=True))


def _question(prompt: Prompt, response: str) -> rewards.ScoreRequest:
    return rewards.ScoreRequest(
        response=response,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        prompt_text=prompt.text,
        uid=prompt.uid,
    )


def _greedy_twin(group: int) -> int:
    """The number under which a group's greedy sample goes through the engine, and the group of such a number: groups
    count from 0, so no group has it."""
    return -1 - group


def _greedy_request(request: GenerationRequest) -> list[GenerationRequest]:
    if not request.with_greedy:
        return []
    greedy = replace(request.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
    return [replace(request, group=_greedy_twin(request.group), sampling=greedy, with_greedy=False)]


def _join(request: GenerationRequest, completion: Completion, text: str) -> SampleTokens:
    """Prompt and response in one piece, exactly as sampled: nothing is tokenised again."""
    prompt = request.prompt.tokens
    blank = np.zeros(len(prompt), dtype=np.float32)
    return SampleTokens(
        tokens=np.concatenate([np.asarray(prompt, dtype=np.int32), completion.tokens.astype(np.int32)]),
        loss_mask=np.concatenate([blank.astype(bool), np.ones(len(completion.tokens), dtype=bool)]),
        rollout_log_probs=np.concatenate([blank, completion.log_probs.astype(np.float32)]),
        text=text,
        routed_experts=completion.routed_experts,
        images=request.images,
    )
