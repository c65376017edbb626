"""Rewards of several scorers: a weighted sum, with each scorer's own numbers beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megarl.recipe.judge import JUDGE
from megarl.rewards.base import Score, Scorer, demands_ground_truth, find, resolve
from megarl.rewards.settings import ScorerSettings

_NOTHING = "unscored"  # what the rollout process scores with where the judge is the only term


@dataclass(frozen=True)
class Term:
    """One scorer of a row. `label` names its numbers in metrics; None: it is the only one, and they have their own names."""

    scorer: Scorer
    weight: float = 1.0
    label: str | None = None


def label_of(name: str) -> str:
    """What metrics call a scorer: its registered name, or the function's own of ``module:function``."""
    return name.rpartition(":")[2]


def needed_columns(function: str | None, functions: Mapping[str, float]) -> tuple[str, ...]:
    """Return the columns that rows must have besides the prompt, with the recipe's reward.function and reward.functions.

    Without either, `data_source` chooses a scorer. `reward_model` holds the ground truth, which megarl's scorers compare
    with. A function of the recipe's own, a service or a judge may do without.
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
    """What each data source is scored by: the recipe's reward.functions, else its reward.function, else by the source.

    A judge's term is not among them: it is added where its verdicts come in (`with_judgement`). Raises ValueError as
    `resolve`.
    """
    if not functions:
        function = _NOTHING if function == JUDGE else function
        return {source: (Term(scorer),) for source, scorer in resolve(function, data_sources, settings).items()}
    terms = tuple(
        Term(find(name, settings), weight, label_of(name)) for name, weight in functions.items() if name != JUDGE
    )
    return {source: terms or (Term(find(_NOTHING, settings)),) for source in data_sources}


def combine(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """The weighted sum of `scores`, one a term.

    Parts are each scorer's score, unweighted, under its label, and its own parts under ``label/part``. `accuracy` and
    the answer are those of the first scorer that reports one. Rewards of steps are weighted, too, and those that end
    at the same character are added up; the part `steps` is their sum. Reasons stand below each other under their labels.
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
    """A sample's reward and parts with the judge's score added, as `combine` adds a last term.

    weight: of the term; None: the judge is the whole reward, and its score has no part of its own.
    right_from: the least score that is right (`accuracy`); None: the judge does not say what is.
    """
    right = {} if right_from is None else {"accuracy": float(score >= right_from)}
    if weight is None:
        return reward + score, {**right, **parts}
    own = {JUDGE: score, **{f"{JUDGE}/{name}": value for name, value in right.items()}}
    return math.fsum([reward, weight * score]), {**right, **parts, **own}
