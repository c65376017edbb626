"""The order in which rows are drawn, as a pure function of the position.

Because the position alone is the state, a resumed run continues with exactly the next row, and
nothing but one integer is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Sampler:
    """An endless walk over `size` rows: every epoch visits each row once.

    With `shuffle`, each epoch has an order of its own, drawn from (seed, epoch); without, rows come
    as they lie in the files.
    """

    size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"there are no rows to draw from (size {self.size})")

    def at(self, position: int) -> int:
        """The row index drawn at `position` (0, 1, 2, ... over the whole run, epochs included)."""
        epoch, offset = divmod(position, self.size)
        assert epoch >= 0, f"position {position}"
        return int(_order(self.size, self.seed, epoch)[offset]) if self.shuffle else offset


@lru_cache(maxsize=4)  # a run and its evaluation, each possibly across the seam of two epochs
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    # Sorted raw 64-bit draws, not Generator.permutation: numpy promises the former never to change.
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(draws, kind="stable")
