"""Rewards: score responses. A file with `@scorer` registers a scorer; the others call scorers or help them.

To add a scorer, write a decorated function in a new file of this folder::

    @scorer("echo", sources=("me/echo",))
    def echo(request: ScoreRequest) -> dict[str, float]:
        return {"score": float(request.response == request.ground_truth)}

The package imports every module of this folder, so a scorer imports heavy libraries (sympy, a sandbox)
inside its function.
"""

import importlib
import pkgutil

from megarl.rewards.base import RewardError, Score, Scorer, ScoreRequest, find, resolve, score, score_awaited, scorer
from megarl.rewards.settings import ScorerSettings

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = [
    "RewardError",
    "Score",
    "ScoreRequest",
    "Scorer",
    "ScorerSettings",
    "find",
    "resolve",
    "score",
    "score_awaited",
    "scorer",
]
