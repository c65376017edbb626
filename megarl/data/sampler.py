"""The order in which rows are drawn: a pure function of the position, also for several sets mixed by weight.

The position is the only state, so a resumed run continues with exactly the next row and saves only one integer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Sampler:
    """An endless sequence of row indices: every epoch visits each of `size` rows once.

    With `shuffle`, the order of each epoch is drawn from (seed, stream, epoch); without, rows keep their order in the
    files. `difficulty` (float [size]; NaN: unknown) sorts rows from easy to hard: ties keep the order above, unknown rows
    come last. `curriculum_epochs` limits this to the first epochs; None: all epochs.
    """

    size: int
    seed: int
    shuffle: bool = True
    stream: int = 0  # index of the set in a mix, so that sets of equal size get different orders
    difficulty: np.ndarray | None = field(default=None, compare=False)
    curriculum_epochs: int | None = None
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the set has no rows (size {self.size})")
        assert self.difficulty is None or self.difficulty.shape == (self.size,)

    def at(self, position: int) -> int:
        """Return the row index drawn at `position` (0, 1, 2, ... over the whole run, epochs included)."""
        epoch, offset = divmod(position, self.size)
        assert epoch >= 0, f"position {position}"
        if epoch not in self._orders:
            while len(self._orders) > 1:  # two orders suffice for a step that spans two epochs
                self._orders.pop(next(iter(self._orders)), None)
            self._orders[epoch] = self._order(epoch)
        return int(self._orders[epoch][offset])

    def _order(self, epoch: int) -> np.ndarray:
        """Return the row indices of one epoch, int64 [size]."""
        order = np.arange(self.size)
        if self.shuffle:
            # Sorted raw 64-bit draws, not Generator.permutation: numpy promises the former never to change.
            entropy = [self.seed, epoch, self.stream] if self.stream else [self.seed, epoch]
            draws = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(self.size)
            order = np.argsort(draws, kind="stable")
        if self.difficulty is not None and (self.curriculum_epochs is None or epoch < self.curriculum_epochs):
            order = order[np.argsort(self.difficulty[order], kind="stable")]
        return order


@dataclass(frozen=True)
class MixedSampler:
    """An endless sequence of row indices over several sets; indices count through the sets in order.

    Draw j of a set of weight w is due at time (j + 1/2) / w, and draws are ordered by due time. Any run of draws
    therefore contains each set in proportion to its weight, to within about a row, however it is cut into batches. The
    draw at a position is computed without the earlier ones.
    """

    names: Sequence[str]
    samplers: Sequence[Sampler]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.samplers) == len(self.weights) > 0
        assert all(weight > 0 for weight in self.weights), self.weights

    def at(self, position: int) -> int:
        """Return the row index drawn at `position`, over all sets."""
        number, before = self._place(position)
        first = sum(sampler.size for sampler in self.samplers[:number])
        return first + self.samplers[number].at(before[number])

    def metrics(self, positions: Iterable[int]) -> dict[str, float]:
        """Return a step's metrics: rows drawn from each set, and epochs of it that the run has used so far."""
        places = [self._place(position) for position in positions]
        if not places:
            return {}
        rows = Counter(number for number, _ in places)
        last, before = max(places, key=lambda place: sum(place[1]))
        metrics: dict[str, float] = {}
        for number, (name, sampler) in enumerate(zip(self.names, self.samplers, strict=True)):
            metrics[f"data/rows/{name}"] = float(rows[number])
            metrics[f"data/epochs/{name}"] = (before[number] + (number == last)) / sampler.size
        return metrics

    def _place(self, position: int) -> tuple[int, list[int]]:
        """Return (index of the set drawn at `position`, earlier draws of each set)."""
        assert position >= 0, f"position {position}"
        # Integer arithmetic, because a rounded due time would change the order: weights scaled to integers, and the time
        # between two draws of each set.
        shares, intervals = self._shares
        count, total = len(shares), sum(shares)
        # Begin at a time when at most `position` draws are due: each set is at most half a draw ahead of its share.
        rounds = max(0, position - count)
        before = [max(0, -((total - 2 * rounds * share) // (2 * total))) for share in shares]
        while True:
            due = min(range(count), key=lambda number: ((2 * before[number] + 1) * intervals[number], number))
            if sum(before) == position:
                return due, before
            before[due] += 1

    @cached_property
    def _shares(self) -> tuple[list[int], list[int]]:
        weights = [Fraction(weight) for weight in self.weights]
        denominator = math.lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * denominator) for weight in weights]
        return shares, [math.prod(shares) // share for share in shares]
