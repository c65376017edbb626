"""Score one row of each data source with every scorer of a recipe: a right answer should earn more than a wrong one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.data.prompts import ground_truth_of
from megarl.data.rows import Row, messages_of, text_of
from megarl.errors import RecipeError
from megarl.preflight.data import check_rewards
from megarl.preflight.findings import Survey
from megarl.recipe.judge import JUDGE
from megarl.recipe.remote import SERVICES
from megarl.recipe.schema import Recipe
from megarl.rewards import Score, ScoreRequest
from megarl.rewards.scoring import Outcome, Scoring
from megarl.rewards.weighted import Term, needed_columns
from megarl.types import SampleFailure, Turn

WRONG = "I do not know."


def score_once(recipe: Recipe, rows: Sequence[Row], result: Survey) -> None:
    """Add the findings to `result`. Judges, services and other scorers that wait for an answer are reported, not called."""
    for name in [*([JUDGE] if recipe.reward.uses_judge else []), *recipe.reward.services]:
        result.unavailable(f"reward: {name} is not called in a plan")
    requests: dict[str, ScoreRequest] = {}
    with result.part("data.train_files"):
        needed = needed_columns(recipe.reward.function, recipe.reward.functions)
        requests = _requests(rows, needs_truth="reward_model" in needed)
    if not requests and not (recipe.reward.function or recipe.reward.functions):
        result.unavailable("reward: the rows' data_source chooses the scorer, and no row is on this machine")
    with result.part("reward.function"):
        terms = check_rewards(recipe, list(requests))
        for source, request in requests.items():
            for term in terms[source]:
                if not term.scorer.awaited and term.scorer.name != "unscored":
                    with result.part("reward"):
                        _score(recipe, term, request, result)
                elif term.scorer.awaited and term.scorer.name not in SERVICES:
                    result.unavailable(f"reward: {term.scorer.name} is async, and is not called in a plan")


def _requests(rows: Sequence[Row], *, needs_truth: bool) -> dict[str, ScoreRequest]:
    """Return a request for the first row of each data source, with an empty response."""
    requests: dict[str, ScoreRequest] = {}
    for row in rows:
        source = row.need("data_source", str)
        if source in requests:
            continue
        truth = ground_truth_of(row, needed=needs_truth)
        extra, question = row.get("extra_info", dict) or {}, text_of(messages_of(row, "prompt"))
        requests[source] = ScoreRequest("", truth, source, extra, question, row.where)
    return requests


def _score(recipe: Recipe, term: Term, request: ScoreRequest, result: Survey) -> None:
    """Score a wrong answer, and right answers in the formats that scorers read."""
    requests = []
    for response in (WRONG, *_right_responses(request.ground_truth)):
        turns = (Turn("assistant", response),) if recipe.agent.is_used else ()  # of a sample that called no tool
        requests.append(replace(request, response=response, turns=turns))
    outcomes = _outcomes(recipe, term, requests)
    name = term.scorer.name
    failures = [outcome for outcome, _ in outcomes if isinstance(outcome, SampleFailure)]
    if failures:
        raise RecipeError(
            "reward",
            f"the scorer {name!r} fails on {request.uid}: {failures[0].cause}",
            "correct the rows' ground_truth or the scorer, or set reward.function to another",
        )
    wrong, *right = (outcome.value for outcome, _ in outcomes if isinstance(outcome, Score))
    if right and max(right) > wrong:
        scores = f"a correct answer scores {max(right):g}, a wrong one {wrong:g}"
        result.notice(f"Scorer {name}, {request.data_source}: {scores}.")
    else:
        result.notice(
            f"Scorer {name}, {request.data_source}: runs. Whether a correct answer scores more than a wrong one is unknown: "
            "the ground truth gives no answer that this scorer accepts."
        )


def _right_responses(truth: Any) -> list[str]:
    """Return responses that give the ground truth as their answer, in several formats; [] if there is no ground truth."""
    if truth is None:
        return []
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    return [f"Answer: {text}\n\\boxed{{{text}}}\n#### {text}", text]


def _outcomes(recipe: Recipe, term: Term, requests: Sequence[ScoreRequest]) -> list[Outcome]:
    """Score as the rollout process does: a scorer that exceeds reward.timeout is killed."""
    settings = replace(recipe.reward, processes=1, retries=0)
    scoring = Scoring({requests[0].data_source: (term,)}, settings, recipe.sandbox)
    try:
        scoring.start()
        return asyncio.run(scoring.score(requests))
    finally:
        scoring.close()
