"""How the samples of a group become scores, wherever their scorers run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl import rewards
from megarl.config.schema import RewardConfig
from megarl.rewards import Score, Scorer, ScoreRequest
from megarl.rewards.weighted import Term, combine
from megarl.scoring.pool import Outcome, ProcessPool
from megarl.types import ScoringFailure


class Scoring:
    """Scores with `terms`, by data source. Scorers that are `in_process` are called in threads, others in processes,
    which are started where there are any such scorers."""

    def __init__(self, terms: Mapping[str, Sequence[Term]], settings: RewardConfig) -> None:
        self.terms, self.retries = dict(terms), settings.retries
        scorers = {term.scorer.name: term.scorer for row in terms.values() for term in row}
        apart = [name for name, scorer in scorers.items() if not scorer.in_process]
        self.pool = ProcessPool(apart, settings.processes, settings.timeout, settings.retries) if apart else None
        self.threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="scorer")

    def start(self) -> None:
        """Wait until samples can be scored. Raises RuntimeError where a scorer cannot be imported."""
        if self.pool is not None:
            self.pool.start()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """An outcome for each of `requests`, which are of one data source: a score, or why there is none."""
        terms = self.terms[requests[0].data_source]
        if len(terms) == 1:  # the common case, without a task of its own
            return [_joined(terms, (outcome,)) for outcome in await self._outcomes(terms[0].scorer, requests)]
        columns = await asyncio.gather(*(self._outcomes(term.scorer, requests) for term in terms))
        return [_joined(terms, row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """End every process."""
        if self.pool is not None:
            self.pool.close()
        self.threads.shutdown(wait=False)

    async def _outcomes(self, scorer: Scorer, requests: Sequence[ScoreRequest]) -> Sequence[Outcome]:
        if scorer.in_process:
            return await asyncio.get_running_loop().run_in_executor(self.threads, self._in_process, scorer, requests)
        assert self.pool is not None, "made where a scorer is not in_process"
        return await asyncio.gather(
            *(asyncio.wrap_future(self.pool.submit(scorer.name, request)) for request in requests)
        )

    def _in_process(self, scorer: Scorer, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        return [self._attempts(scorer, request) for request in requests]

    def _attempts(self, scorer: Scorer, request: ScoreRequest) -> Outcome:
        for attempt in range(self.retries + 1):
            try:
                return rewards.score(scorer, request), attempt
            except rewards.RewardError as error:
                cause = error.cause
        return ScoringFailure(scorer.name, request.uid, "error", cause, self.retries + 1), self.retries


def _joined(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of a sample, of one a term. A sample that any scorer failed on has no score."""
    retries = sum(repeated for _, repeated in outcomes)
    scores: list[Score] = []
    for result, _ in outcomes:
        if isinstance(result, ScoringFailure):
            return result, retries
        scores.append(result)
    return combine(terms, scores), retries
