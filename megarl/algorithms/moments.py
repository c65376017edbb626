"""Mean and variance of numbers that lie in many places, and whitening by them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Moments:
    """What is known of many numbers that lie in many places: enough for mean and variance of all of them."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (x - mean)^2
    least: float = np.inf
    largest: float = -np.inf

    @classmethod
    def of(cls, numbers: np.ndarray, counts: np.ndarray | None = None) -> Moments:
        """Of `numbers`, each of which occurs once, or as often as `counts` says (which may be 0)."""
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
        """Of both (Chan et al., 1979): no large sums that cancel."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
            float(np.minimum(self.least, other.least)),  # keep a NaN, which min() and max() may drop
            float(np.maximum(self.largest, other.largest)),
        )

    def metrics(self, name: str, whitening: Whitening) -> dict[str, float]:
        """Mean, maximum and minimum after `whitening`; empty where there is no number."""
        if not self.count:
            return {}
        values = {"mean": self.mean, "max": self.largest, "min": self.least}
        return {f"{name}/{what}": float(whitening(value)) for what, value in values.items()}

    @property
    def variance(self) -> float:
        """With Bessel's correction, as verl whitens; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True)
class Whitening:
    """x -> (x - mean) * scale: the same for the advantages of a whole batch, wherever they lie."""

    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def by(cls, moments: Moments) -> Whitening:
        """To mean 0 and variance 1. Advantages that are all the same become 0."""
        return cls(moments.mean, 1.0 / np.sqrt(moments.variance + 1e-8))

    def __call__(self, numbers: Any) -> Any:
        """Of an array or one number."""
        return (numbers - self.mean) * self.scale
