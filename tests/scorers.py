"""Rewards of the user's own, as a recipe names them: reward.function=tests.scorers:letters."""

from __future__ import annotations

import math

from megarl.rewards import ScoreRequest


def letters(request: ScoreRequest) -> dict[str, float]:
    """The share of letters: something that even a random model's samples differ in, and that can be learned."""
    share = sum(character.isalpha() for character in request.response) / max(len(request.response), 1)
    return {"score": share, "accuracy": float(share > 0.5)}


def mostly_letters(request: ScoreRequest) -> float:
    """1 for what has more letters than most of a random model's samples, else 0."""
    return float(letters(request)["score"] > 0.7)


def pieces(request: ScoreRequest) -> dict[str, object]:
    """As `letters`, of each piece of six characters by itself (the last may be shorter); and half a point for a whole
    response of letters."""
    text = request.response
    ends = [*range(6, len(text), 6), len(text)] if text else []
    steps = [
        (end, sum(c.isalpha() for c in text[start:end]) / 60) for start, end in zip([0, *ends], ends, strict=False)
    ]
    return {"score": 0.5 * text.isalpha(), "accuracy": float(text.isalpha()), "steps": steps}


def raises(request: ScoreRequest) -> float:
    raise ZeroDivisionError("no such luck")


def not_a_number(request: ScoreRequest) -> float:
    return math.nan
