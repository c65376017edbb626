"""Rewards of the user's own, as a recipe names them: reward.function=tests.scorers:letters."""

from __future__ import annotations

import math

from megarl.rewards import ScoreRequest


def letters(request: ScoreRequest) -> dict[str, float]:
    """The share of letters: something that even a random model's samples differ in, and that can be learned."""
    share = sum(character.isalpha() for character in request.response) / max(len(request.response), 1)
    return {"score": share, "accuracy": float(share > 0.5)}


def raises(request: ScoreRequest) -> float:
    raise ZeroDivisionError("no such luck")


def not_a_number(request: ScoreRequest) -> float:
    return math.nan
