"""Reward scorers as jobs of a subprocess pool."""

from __future__ import annotations

from typing import Any

from megarl import rewards
from megarl.rewards import RewardError, Score, ScoreRequest, ScorerSettings
from megarl.subprocess_pool.job import CallError, Job

FINDER = f"{__name__}:scorer_job"


def scorer_job(name: str, settings: dict[str, Any]) -> Job:
    """Return the job of the scorer `name`, registered or ``module:function``. `settings`: `ScorerSettings.as_json()`.

    Raises ValueError if the scorer does not exist.
    """
    scorer = rewards.find(name, ScorerSettings.of_json(settings))

    def score(request: ScoreRequest) -> Score:
        try:
            return rewards.score(scorer, request)
        except RewardError as error:
            raise CallError(error.cause) from error

    async def score_awaited(request: ScoreRequest) -> Score:
        try:
            return await rewards.score_awaited(scorer, request)
        except RewardError as error:
            raise CallError(error.cause) from error

    return Job(score_awaited if scorer.awaited else score, scorer.prepare)
