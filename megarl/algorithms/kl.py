"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (Schulman, joschu.net/blog/kl-approx).

Each takes log_probs [T] and reference_log_probs [T] and returns [T]. The log-ratio is clamped to +-20 before exp, so an
outlier gives a large number instead of inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def limited(log_ratio: Tensor) -> Tensor:
    """Clamp `log_ratio` [T] to +-20. `hardtanh` equals clamp, with a gradient at a third of clamp's time."""
    from torch.nn.functional import hardtanh

    return hardtanh(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")


@KL_ESTIMATORS.register("kl")
def kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k1: log p - log q. Unbiased, may be negative."""
    return log_probs - reference_log_probs


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|log p - log q|."""
    return (log_probs - reference_log_probs).abs()


@KL_ESTIMATORS.register("mse")
def mse(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k2: (log p - log q)^2 / 2."""
    return 0.5 * (log_probs - reference_log_probs).square()


@KL_ESTIMATORS.register("low_var_kl")
def low_var_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k3: q/p - log(q/p) - 1. Unbiased, never negative, low variance."""
    log_ratio = limited(reference_log_probs - log_probs)
    return log_ratio.exp() - log_ratio - 1.0


MAX_ERROR = 0.2
"""Bound of the proportional error in `KLWeight.adapt`."""


@dataclass
class KLWeight:
    """The weight of the KL, fixed or adapted to a target (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    value: float
    target: float | None  # None: fixed
    horizon: int  # in samples

    def __post_init__(self) -> None:
        self._initial = self.value

    def reset(self) -> None:
        """Return to the value of the first step."""
        self.value = self._initial

    def adapt(self, kl: float, samples: int) -> None:
        """Update after a step of `samples` samples with mean token KL `kl` to the reference policy.

        value *= 1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon. A non-finite KL is ignored.
        """
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
            self.value *= 1.0 + error * samples / self.horizon
