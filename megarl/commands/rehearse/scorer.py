"""A coin as a scorer: a random model's answers are all wrong, and groups with equal rewards have no gradient."""

from __future__ import annotations

import zlib

from megarl.rewards.base import ScoreRequest

NAME = f"{__name__}:coin"


def coin(request: ScoreRequest) -> dict[str, float]:
    """Score about half of all responses with 1, by the CRC-32 of their text. The accuracy is the same value."""
    heads = float(zlib.crc32(request.response.encode()) % 2)
    return {"score": heads, "accuracy": heads}
