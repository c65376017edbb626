"""For runs that learn from no reward, as distillation does."""

from __future__ import annotations

from megarl.rewards.base import ScoreRequest, scorer


@scorer("unscored", in_process=True, needs_ground_truth=False)
def unscored(request: ScoreRequest) -> dict[str, float]:
    """0 for everything."""
    return {"score": 0.0}
