"""Constant reward for runs that do not learn from rewards, such as distillation."""

from __future__ import annotations

from megarl.rewards.base import ScoreRequest, scorer


@scorer("unscored", in_process=True, needs_ground_truth=False)
def unscored(request: ScoreRequest) -> dict[str, float]:
    """Return 0."""
    return {"score": 0.0}
