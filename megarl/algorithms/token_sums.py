"""Sums over the loss tokens of a mini batch, for losses that select tokens by score (covariance.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs, advantages_of, kept

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenSums:
    """Sums over the loss tokens of a part of the mini batch; parts add up."""

    tokens: float = 0.0
    log_probs: float = 0.0
    advantages: float = 0.0

    @classmethod
    def of(cls, inputs: LossInputs) -> TokenSums:
        def total(values: Tensor) -> float:
            return float(kept(values.detach(), inputs.counted).double().sum().item())

        return cls(total(inputs.counted), total(inputs.log_probs), total(advantages_of(inputs)))

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            self.tokens + other.tokens, self.log_probs + other.log_probs, self.advantages + other.advantages
        )

    def count(self, share: float) -> int:
        """Return the number of tokens in a fraction `share` of all: at least 1, and rounded down as by the authors."""
        return max(1, int(share * self.tokens))
