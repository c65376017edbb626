"""Mean and variance of numbers spread over ranks, and whitening with them. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Mergeable statistics: enough for mean, variance, minimum and maximum of numbers spread over ranks."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (x - mean)^2
    least: float = np.inf
    largest: float = -np.inf

    @classmethod
    def of(cls, numbers: np.ndarray, counts: np.ndarray | None = None) -> Moments:
        """Summarize `numbers`, each counted once, or `counts` times (0 allowed)."""
        if counts is not None:
            numbers, counts = numbers[counts > 0], counts[counts > 0]
        if not numbers.size:
            return cls()
        exact = numbers.astype(np.float64)
        mean = float(np.average(exact, weights=counts))
        squares = float(((exact - mean) ** 2 * (1 if counts is None else counts)).sum())
        count = exact.size if counts is None else int(counts.sum())
        return cls(count, mean, squares, float(exact.min()), float(exact.max()))

    def __add__(self, other: Moments) -> Moments:
        """Merge both (Chan et al., 1979), without cancellation of large sums."""
        count = self.count + other.count
        if not count:
            return self
        difference = other.mean - self.mean
        return Moments(
            count,
            self.mean + difference * other.count / count,
            self.squares + other.squares + difference**2 * self.count * other.count / count,
            float(np.minimum(self.least, other.least)),  # keep a NaN, which min() and max() may drop
            float(np.maximum(self.largest, other.largest)),
        )

    def metrics(self, name: str, whitening: Whitening) -> dict[str, float]:
        """Return mean, maximum and minimum after `whitening`; {} without numbers."""
        if not self.count:
            return {}
        values = {"mean": self.mean, "max": self.largest, "min": self.least}
        return {f"{name}/{key}": float(whitening(value)) for key, value in values.items()}

    @property
    def variance(self) -> float:
        """Return the variance with Bessel's correction, as verl uses for whitening; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True)
class Whitening:
    """x -> (x - mean) * scale, equal for the advantages of a whole batch on all ranks."""

    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def by(cls, moments: Moments) -> Whitening:
        """Whiten to mean 0 and variance 1. Equal advantages all become 0."""
        return cls(moments.mean, 1.0 / np.sqrt(moments.variance + 1e-8))

    def __call__(self, numbers: Any) -> Any:
        """Whiten an array or a number."""
        return (numbers - self.mean) * self.scale
