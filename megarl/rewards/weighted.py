"""Weighted sum of several scorers; each scorer's unweighted numbers become parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megarl.recipe.judge import JUDGE
from megarl.rewards.base import Score, Scorer, ScoreRequest, demands_ground_truth, find, resolve, scorer
from megarl.rewards.settings import ScorerSettings

_NOTHING = "unscored"  # scorer of the rollout process if the judge is the only term


@scorer(_NOTHING, in_process=True, needs_ground_truth=False)
def unscored(request: ScoreRequest) -> dict[str, float]:
    """Return 0: for runs that do not learn from rewards, such as distillation."""
    return {"score": 0.0}


@dataclass(frozen=True)
class Term:
    """Scorer of a row with its weight. `label` prefixes its parts in metrics; None, for an only scorer: no prefix."""

    scorer: Scorer
    weight: float = 1.0
    label: str | None = None


def needed_columns(function: str | None, functions: Mapping[str, float]) -> tuple[str, ...]:
    """Return the columns that rows need besides the prompt, for the recipe's reward.function and reward.functions.

    Without both, `data_source` chooses a scorer. `reward_model` holds the ground truth. Most of megarl's scorers need
    it; user functions, a remote service and a judge do not.
    """
    names = [*functions] or ([function] if function else [])
    if not names:
        return "data_source", "reward_model"
    return ("reward_model",) if any(demands_ground_truth(name) for name in names) else ()


def terms_of(
    function: str | None,
    functions: Mapping[str, float],
    data_sources: Iterable[str],
    settings: ScorerSettings | None = None,
) -> dict[str, tuple[Term, ...]]:
    """Return the terms of each data source: reward.functions, else reward.function, else the data source's scorer.

    The judge's term is missing here: `with_judgement` adds it to the scored group. Raises ValueError as `resolve`.
    """
    if not functions:
        function = _NOTHING if function == JUDGE else function
        return {source: (Term(scorer),) for source, scorer in resolve(function, data_sources, settings).items()}
    terms = tuple(
        Term(find(name, settings), weight, name.rpartition(":")[2])
        for name, weight in functions.items()
        if name != JUDGE
    )
    return {source: terms or (Term(find(_NOTHING, settings)),) for source in data_sources}


def combine(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """Return the weighted sum of `scores`, with one score per term.

    Parts: each scorer's unweighted score under its label, and its parts under ``label/part``. `accuracy` and the answer
    come from the first scorer that reports them. Step rewards are weighted, and rewards at the same character are
    summed; the part `steps` is the sum of all. Each reason becomes a line after its label.
    """
    if len(terms) == 1 and terms[0].label is None:
        return scores[0]
    parts: dict[str, float] = {}
    earned: dict[int, list[float]] = {}
    for term, score in zip(terms, scores, strict=True):
        parts[str(term.label)] = score.value
        parts.update({f"{term.label}/{name}": value for name, value in score.parts.items()})
        for end, reward in score.steps:
            earned.setdefault(end, []).append(term.weight * reward)
    accuracies = [score.parts["accuracy"] for score in scores if "accuracy" in score.parts]
    if accuracies:
        parts["accuracy"] = accuracies[0]
    steps = tuple((end, math.fsum(rewards)) for end, rewards in sorted(earned.items()))
    if any("steps" in score.parts for score in scores):
        parts["steps"] = math.fsum(reward for _, reward in steps)
    value = math.fsum(term.weight * score.value for term, score in zip(terms, scores, strict=True))
    answers = [score.answer for score in scores if score.answer is not None]
    reasons = "\n".join(
        f"{term.label}: {score.reason}" for term, score in zip(terms, scores, strict=True) if score.reason
    )
    return Score(value, parts, answers[0] if answers else None, steps, reasons)


def with_judgement(
    reward: float, parts: Mapping[str, float], score: float, weight: float | None, right_from: float | None
) -> tuple[float, dict[str, float]]:
    """Add the judge's score to a sample's reward and parts, like a last term of `combine`.

    weight: weight of the judge's term; None: the judge is the only term, and its score gets no part.
    right_from: lowest score that counts as correct (`accuracy`); None: the judge reports no accuracy.
    """
    right = {} if right_from is None else {"accuracy": float(score >= right_from)}
    if weight is None:
        return reward + score, {**right, **parts}
    judge_parts = {JUDGE: score, **{f"{JUDGE}/{name}": value for name, value in right.items()}}
    return math.fsum([reward, weight * score]), {**right, **parts, **judge_parts}
