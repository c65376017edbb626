"""Each scorer of a recipe called on a row of each data source: it must read the row's ground truth, and should tell an
answer that is right from one that is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.commands.plan.count.types import Refusal
from megarl.data.prompts import ground_truth_of
from megarl.data.rows import Row, messages_of, text_of
from megarl.preflight.run import check_rewards
from megarl.recipe.agent import uses_tools
from megarl.recipe.judge import JUDGE, uses_judge
from megarl.recipe.remote import uses_remote
from megarl.recipe.schema import Recipe
from megarl.rewards import Score, ScoreRequest
from megarl.rewards.scoring import Outcome, Scoring
from megarl.rewards.weighted import Term, needed_columns
from megarl.types import SampleFailure, Turn

if TYPE_CHECKING:
    from megarl.commands.plan.preflight import Checked

WRONG = "I do not know."


def score_once(recipe: Recipe, rows: Sequence[Row], found: Checked) -> None:
    """Note in `found` what came of it. A judge and services are named, and not asked."""
    asked = {JUDGE: uses_judge(recipe), "remote": uses_remote(recipe.reward)}
    found.unchecked += [f"reward: {name} is not asked here" for name, used in asked.items() if used]
    requests: dict[str, ScoreRequest] = {}
    with found.refusing("data.train_files"):
        needed = needed_columns(recipe.reward.function, recipe.reward.functions)
        requests = _requests(rows, needs_truth="reward_model" in needed)
    if not requests and not (recipe.reward.function or recipe.reward.functions):
        found.unchecked.append("reward: what scores the rows hangs on their data_source, and none of them is here")
    with found.refusing("reward.function"):
        terms = check_rewards(recipe, list(requests))
        for source, request in requests.items():
            for term in terms[source]:
                if term.scorer.awaited:
                    if term.scorer.name != "remote":
                        found.unchecked.append(f"reward: {term.scorer.name} waits for somebody, and is not called here")
                elif term.scorer.name != "unscored":
                    _score(recipe, term, request, found)


def _requests(rows: Sequence[Row], *, needs_truth: bool) -> dict[str, ScoreRequest]:
    """About the first row of each data source, still without a response."""
    requests: dict[str, ScoreRequest] = {}
    for row in rows:
        source = row.need("data_source", str)
        if source in requests:
            continue
        truth = ground_truth_of(row, needed=needs_truth)
        extra, asked = row.get("extra_info", dict) or {}, text_of(messages_of(row, "prompt"))
        requests[source] = ScoreRequest("", truth, source, extra, asked, row.where)
    return requests


def _score(recipe: Recipe, term: Term, request: ScoreRequest, found: Checked) -> None:
    """A wrong answer, and right ones in the forms that scorers read."""
    responses = [WRONG, *_right(request.ground_truth)]
    outcomes = _outcomes(recipe, term, [_with(request, response, uses_tools(recipe)) for response in responses])
    name, of = term.scorer.name, f"rows of {request.data_source}"
    failures = [outcome for outcome, _ in outcomes if isinstance(outcome, SampleFailure)]
    if failures:
        found.refusals.append(
            Refusal(
                "reward",
                f"the scorer {name!r} fails on {request.uid}: {failures[0].cause}",
                "mend the rows' ground_truth or the scorer, or set reward.function to another",
            )
        )
        return
    wrong, *right = (outcome.value for outcome, _ in outcomes if isinstance(outcome, Score))
    if right and max(right) > wrong:
        found.notes.append(f"The scorer {name} gives {of} {max(right):g} for their ground truth, else {wrong:g}.")
    else:
        found.notes.append(
            f"The scorer {name} reads {of}; that it gives more for a right answer is not known: none could be made of the "
            "ground truth."
        )


def _with(request: ScoreRequest, response: str, with_tools: bool) -> ScoreRequest:
    """As of a sample that called no tool."""
    return replace(request, response=response, turns=(Turn("assistant", response),) if with_tools else ())


def _right(truth: Any) -> list[str]:
    """Responses whose answer is the ground truth, as far as it is an answer; none without a ground truth."""
    if truth is None:
        return []
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    return [f"Answer: {text}\n\\boxed{{{text}}}\n#### {text}", text]


def _outcomes(recipe: Recipe, term: Term, requests: Sequence[ScoreRequest]) -> list[Outcome]:
    """As in the rollout process: one that hangs is ended."""
    settings = replace(recipe.reward, processes=1, retries=0)
    scoring = Scoring({requests[0].data_source: (term,)}, settings, recipe.sandbox)
    try:
        scoring.start()
        return asyncio.run(scoring.score(requests))
    finally:
        scoring.close()
