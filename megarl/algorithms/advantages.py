"""Advantage estimators over the outcome rewards of a batch.

An estimator takes rewards [B] and the group of each sample [B] (any integers; siblings share one)
and returns advantages [B]: one number a sample, given to each of its tokens.
Group operations are segment operations, so groups need not be equal in size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from megarl.registry import Registry

if TYPE_CHECKING:
    from megarl.config.schema import AlgorithmConfig


class AdvantageEstimator(Protocol):
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmConfig) -> np.ndarray: ...


ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


def group_statistics(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each sample's group mean, standard deviation (Bessel-corrected; 0 for a group of one) and size.

    rewards [B] float, groups [B] int -> three arrays [B] in float64.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    _, segment = np.unique(groups, return_inverse=True)
    size = np.bincount(segment).astype(np.float64)
    mean = np.bincount(segment, weights=rewards) / size
    squares = np.bincount(segment, weights=(rewards - mean[segment]) ** 2)
    std = np.sqrt(squares / np.maximum(size - 1, 1))
    return mean[segment], std[segment], size[segment]


@ADVANTAGES.register("grpo")
def grpo(rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Group-relative advantage (DeepSeekMath, arXiv 2402.03300): (r - mean) / (std + 1e-6).

    std carries Bessel's correction, as in verl. A group of one has advantage 0: it has nothing to
    be compared with. With ``normalize_by_std`` off: Dr.GRPO (arXiv 2503.20783), r - mean.
    """
    mean, std, _ = group_statistics(rewards, groups)
    centred = np.asarray(rewards, dtype=np.float64) - mean
    return centred / (std + 1e-6) if settings.normalize_by_std else centred


@ADVANTAGES.register("gae")
def left_to_the_critic(rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Zeros [B]: each token's advantage comes of a critic's values, in its processes; see `values.gae`."""
    return np.zeros(len(rewards))


def uses_critic(settings: AlgorithmConfig) -> bool:
    """Whether the advantages need a critic."""
    return settings.advantage == "gae"


@ADVANTAGES.register("none")
def no_advantage(rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Zeros [B]: for losses that use no advantage (SFT)."""
    return np.zeros(len(rewards))
