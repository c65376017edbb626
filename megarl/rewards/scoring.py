"""Score the samples of a group in threads and in the subprocess pool."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl import rewards
from megarl.cluster.call_gate import CallGates, url_without_secrets
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards import RewardError, Score, Scorer, ScoreRequest, ScorerSettings, ScorerUnavailable
from megarl.rewards.weighted import Term, combine
from megarl.subprocess_pool import job
from megarl.subprocess_pool.pool import ProcessPool
from megarl.types import TOO_SLOW, SampleFailure

FINDER = f"{__name__}:scorer_job"
ATTEMPTS = 3  # of a sample for which a service cannot score, while it scores others
Outcome = tuple["Score | SampleFailure", int]
"""Score or failure of a sample, and the number of repeated attempts."""


class Scoring:
    """Score groups with the `terms` of their data source.

    `in_process` scorers run in threads, other scorers in a pool of processes. `awaited` scorers have a separate pool,
    with many calls at a time in each process. A pool without scorers is not created. While the service behind a scorer is down,
    samples wait.
    """

    def __init__(
        self,
        terms: Mapping[str, Sequence[Term]],
        settings: RewardConfig,
        sandbox: SandboxConfig | None = None,
        gates: CallGates | None = None,
    ) -> None:
        """`gates`: of the process; None: of these scorers alone."""
        self.terms, self.retries = dict(terms), settings.retries
        scorers = {term.scorer.name: term.scorer for row in terms.values() for term in row}
        pooled = [scorer for scorer in scorers.values() if not scorer.in_process]
        self.pools = {
            awaited: scorer_pool(names, settings, sandbox, concurrent=settings.concurrent if awaited else 1)
            for awaited in (False, True)
            if (names := [scorer.name for scorer in pooled if scorer.awaited == awaited])
        }
        gates = gates or CallGates()
        self.gates = {scorer.name: gates.of(_service_of(scorer, settings), repeats=True) for scorer in pooled}
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
        return await asyncio.gather(*(self._pooled(scorer, request) for request in requests))

    async def _pooled(self, scorer: Scorer, request: ScoreRequest) -> Outcome:
        pool = self.pools[scorer.awaited]

        async def attempt() -> job.Outcome:
            call = pool.submit(scorer.name, request, repeats_timeouts=not scorer.slow_is_wrong)
            result = await asyncio.wrap_future(call)
            if isinstance(result, job.Answered) and isinstance(result.value, ScorerUnavailable):
                raise result.value
            return result

        try:
            gate = self.gates[scorer.name]
            result, failures = await gate.call(
                request.uid, attempt, ATTEMPTS, lambda result: isinstance(result, job.Answered)
            )
        except ScorerUnavailable as error:
            source, attempts = f"scorer {scorer.name!r}", error.failures
            return SampleFailure(source, request.uid, "unavailable", str(error), attempts), attempts - 1
        outcome, retries = _outcome(scorer, request, result)
        return outcome, failures + retries

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

    def score(request: ScoreRequest) -> Score | ScorerUnavailable:
        try:
            return rewards.score(scorer, request)
        except RewardError as error:
            return _unavailable(error)

    async def score_awaited(request: ScoreRequest) -> Score | ScorerUnavailable:
        try:
            return await rewards.score_awaited(scorer, request)
        except RewardError as error:
            return _unavailable(error)

    return job.Job(score_awaited if scorer.awaited else score, scorer.prepare)


def _unavailable(error: RewardError) -> ScorerUnavailable:
    """Return ScorerUnavailable as a value, which the pool does not repeat. Raises CallError if the scorer failed otherwise."""
    if error.unavailable is None:
        raise job.CallError(error.cause) from error
    return error.unavailable


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


def _service_of(scorer: Scorer, settings: RewardConfig) -> str:
    """Return the name of the service behind a scorer, for messages."""
    if scorer.name == "remote" and settings.remote.url:
        return url_without_secrets(settings.remote.url)
    return f"scorer {scorer.name!r}"


def _outcome(scorer: Scorer, request: ScoreRequest, result: job.Outcome) -> Outcome:
    if isinstance(result, job.Answered):
        return result.value, result.retries
    if result.kind == "timeout" and scorer.slow_is_wrong:
        return Score(0.0, {"accuracy": 0.0, TOO_SLOW: 1.0}, reason=result.cause), 0
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
