"""Score the samples of a group in threads and in the subprocess pool."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl import rewards
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards import RewardError, Score, Scorer, ScoreRequest, ScorerSettings
from megarl.rewards.weighted import Term, combine
from megarl.subprocess_pool import job
from megarl.subprocess_pool.pool import ProcessPool
from megarl.types import SampleFailure

FINDER = f"{__name__}:scorer_job"
Outcome = tuple["Score | SampleFailure", int]
"""Score or failure of a sample, and the number of repeated attempts."""


class Scoring:
    """Score groups with the `terms` of their data source.

    `in_process` scorers run in threads, other scorers in a pool of processes. `awaited` scorers have a separate pool,
    with many calls at a time in each process. A pool without scorers is not created.
    """

    def __init__(
        self, terms: Mapping[str, Sequence[Term]], settings: RewardConfig, sandbox: SandboxConfig | None = None
    ) -> None:
        self.terms, self.retries = dict(terms), settings.retries
        scorers = {term.scorer.name: term.scorer for row in terms.values() for term in row}
        pooled = [scorer for scorer in scorers.values() if not scorer.in_process]
        self.pools = {
            awaited: scorer_pool(names, settings, sandbox, concurrent=settings.concurrent if awaited else 1)
            for awaited in (False, True)
            if (names := [scorer.name for scorer in pooled if scorer.awaited == awaited])
        }
        self.threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="scorer")

    def start(self) -> None:
        """Wait until samples can be scored. Raises RuntimeError if a scorer cannot be imported."""
        for scorer in {term.scorer.name: term.scorer for row in self.terms.values() for term in row}.values():
            if scorer.in_process and scorer.prepare is not None:
                scorer.prepare()
        for pool in self.pools.values():
            pool.start()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """Return a score or a failure for each of `requests`, which share a data source."""
        terms = self.terms[requests[0].data_source]
        if len(terms) == 1:  # the common case needs no gather
            return [_joined(terms, (outcome,)) for outcome in await self._outcomes(terms[0].scorer, requests)]
        columns = await asyncio.gather(*(self._outcomes(term.scorer, requests) for term in terms))
        return [_joined(terms, row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """End every process."""
        for pool in self.pools.values():
            pool.close()
        self.threads.shutdown(wait=False)

    async def _outcomes(self, scorer: Scorer, requests: Sequence[ScoreRequest]) -> Sequence[Outcome]:
        if scorer.in_process:
            attempts = functools.partial(self._attempts, scorer)
            return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: list(map(attempts, requests)))
        pool = self.pools[scorer.awaited]
        results = await asyncio.gather(
            *(
                asyncio.wrap_future(pool.submit(scorer.name, request, repeats_timeouts=not scorer.slow_is_wrong))
                for request in requests
            )
        )
        return [_outcome(scorer, request, result) for request, result in zip(requests, results, strict=True)]

    def _attempts(self, scorer: Scorer, request: ScoreRequest) -> Outcome:
        for attempt in range(self.retries + 1):
            try:
                return rewards.score(scorer, request), attempt
            except rewards.RewardError as error:
                cause = error.cause
        return SampleFailure(f"scorer {scorer.name!r}", request.uid, "error", cause, self.retries + 1), self.retries


def scorer_job(name: str, settings: dict[str, Any]) -> job.Job:
    """Return the job of the scorer `name`, registered or ``module:function``. `settings`: `ScorerSettings.as_json()`.

    Raises ValueError if the scorer does not exist.
    """
    scorer = rewards.find(name, ScorerSettings.of_json(settings))

    def score(request: ScoreRequest) -> Score:
        try:
            return rewards.score(scorer, request)
        except RewardError as error:
            raise job.CallError(error.cause) from error

    async def score_awaited(request: ScoreRequest) -> Score:
        try:
            return await rewards.score_awaited(scorer, request)
        except RewardError as error:
            raise job.CallError(error.cause) from error

    return job.Job(score_awaited if scorer.awaited else score, scorer.prepare)


def scorer_pool(
    names: Sequence[str], settings: RewardConfig, sandbox: SandboxConfig | None = None, concurrent: int = 1
) -> ProcessPool:
    """Return a pool of processes for the scorers `names` (registered or ``module:function``); each process scores
    `concurrent` samples at a time."""
    return ProcessPool(
        FINDER,
        names,
        ScorerSettings.of(settings, sandbox).as_json(),
        processes=settings.processes,
        timeout=settings.timeout,
        retries=settings.retries,
        timeout_key="reward.timeout",
        concurrent=concurrent,
        memory_mb=settings.memory_mb,
    )


def _outcome(scorer: Scorer, request: ScoreRequest, result: job.Outcome) -> Outcome:
    if isinstance(result, job.Answered):
        return result.value, result.retries
    if result.kind == "timeout" and scorer.slow_is_wrong:
        return Score(0.0, {"accuracy": 0.0, "too_slow": 1.0}, reason=result.cause), 0
    failure = SampleFailure(f"scorer {scorer.name!r}", request.uid, result.kind, result.cause, result.attempts)
    return failure, result.attempts - 1


def _joined(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of all terms of a sample. If any scorer failed, the sample has no score."""
    retries = sum(repeated for _, repeated in outcomes)
    scores: list[Score] = []
    for result, _ in outcomes:
        if isinstance(result, SampleFailure):
            return result, retries
        scores.append(result)
    return combine(terms, scores), retries
