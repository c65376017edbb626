"""Rewards: score responses. Every file here is imported: one with `@scorer` registers a scorer; the others call or help scorers.

To add a scorer, write a decorated function in a new file of this folder::

    @scorer("echo", sources=("me/echo",))
    def echo(request: ScoreRequest) -> dict[str, float]:
        return {"score": float(request.response == request.ground_truth)}

A scorer imports heavy libraries (sympy, a sandbox) inside its function, because its file is always imported.
"""

import importlib
import pkgutil

from megarl.rewards.base import (
    RewardError,
    Score,
    Scorer,
    ScoreRequest,
    ScorerUnavailable,
    find,
    resolve,
    score,
    score_awaited,
    scorer,
)
from megarl.rewards.settings import ScorerSettings

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = [
    "RewardError",
    "Score",
    "ScoreRequest",
    "Scorer",
    "ScorerSettings",
    "ScorerUnavailable",
    "find",
    "resolve",
    "score",
    "score_awaited",
    "scorer",
]
