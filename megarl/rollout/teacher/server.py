"""Teacher process: an engine that returns its log-probs of sampled tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from megarl import engines
from megarl.engines.base import EngineSpec
from megarl.types import Completion, GenerationRequest, Group, Prompt, SampleTokens, Sampling, TokenScores

P = ParamSpec("P")
T = TypeVar("T")


class TeacherServer:
    """Runs inside a service process (see cluster/). Call `score`, then `collect` for each of its groups."""

    def __init__(self, engine: str, spec: EngineSpec):
        assert spec.prompt_top_k is not None
        self.engine = engines.create(engine, spec)
        self.top_k = spec.prompt_top_k
        self.calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-call")
        self._scored: dict[int, list[SampleTokens]] = {}

    async def start(self) -> dict[str, Any]:
        """Load the engine; returns its description."""
        return await self._in_thread(self.engine.start)

    async def score(self, groups: list[Group]) -> None:
        """Compute the log-probs of every token of `groups`. All samples enter the engine in a single call and in their
        order, so the same groups always form the same engine batches."""
        await self._in_thread(self._score, groups)

    async def collect(self, number: int) -> tuple[None, list[SampleTokens]]:
        """Return the samples of a scored group, with the teacher's scores added to their vectors."""
        return None, self._scored.pop(number)

    async def shutdown(self) -> None:
        await self._in_thread(self.engine.shutdown)
        self.calls.shutdown(wait=False)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.calls, call)

    def _score(self, groups: list[Group]) -> None:
        vectors = [group.samples[0].data.get() for group in groups]
        requests = [
            _score_request(number, sample, self.top_k)
            for number, sample in enumerate(sample for samples in vectors for sample in samples)
        ]
        scores: dict[int, TokenScores] = {}

        def finished(number: int, completions: list[Completion]) -> None:
            token_scores = completions[0].prompt
            assert token_scores is not None, "the request sets prompt_top_k"
            scores[number] = token_scores

        self.engine.generate(requests, finished)
        in_order = iter(range(len(requests)))
        for group, samples in zip(groups, vectors, strict=True):
            self._scored[group.number] = [replace(sample, teacher=scores[next(in_order)]) for sample in samples]


def _score_request(number: int, sample: SampleTokens, top_k: int) -> GenerationRequest:
    """Return a request with the whole sample as its prompt. Engines must sample at least 1 token; it is not used."""
    prompt = Prompt(f"sample {number}", tuple(sample.tokens.tolist()), "", "")
    return GenerationRequest(
        number, prompt, Sampling(n=1, max_tokens=1, temperature=0.0), seed=0, images=sample.images, prompt_top_k=top_k
    )
