"""A term of a rehearsal's reward: a random model's answers are all wrong, and groups without spread teach nothing."""

from __future__ import annotations

import zlib

from megarl.rewards.base import ScoreRequest

NAME = f"{__name__}:coin"


def coin(request: ScoreRequest) -> dict[str, float]:
    """1 for about every second response, by its text; it is also what counts as right."""
    heads = float(zlib.crc32(request.response.encode()) % 2)
    return {"score": heads, "accuracy": heads}
