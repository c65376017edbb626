"""Spikes: updates with a gradient norm far above the norms of earlier updates (`train.on_spike`). Pure.

The limit is a multiple of the median, which a few large norms hardly change; a mean or a standard deviation would rise with
them. Losses are not compared: a loss of RL crosses zero, and only a gradient changes weights.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from megarl.recipe.schema import TrainConfig

FEWEST = 16
"""Number of norms from which on updates are judged."""


class GradNorms:
    """Gradient norms of a model's newest applied updates, at most `train.spike_window`.

    Norms of 0 are left out: they come from batches without advantages, and a median of 0 would make every update a spike.
    """

    def __init__(self, config: TrainConfig, norms: Iterable[float] = ()) -> None:
        self.config = config
        self._norms = deque(norms, maxlen=config.spike_window)

    def __len__(self) -> int:
        return len(self._norms)

    @property
    def median(self) -> float:
        """Median of the norms. There must be at least one."""
        return statistics.median(self._norms)

    @property
    def limit(self) -> float:
        """Norm above which an update is a spike; inf without `train.on_spike`, and with fewer than `FEWEST` norms."""
        if self.config.on_spike is None or len(self) < FEWEST:
            return math.inf
        return self.config.spike_factor * self.median

    @property
    def skips(self) -> bool:
        """True if trainers skip updates above the limit."""
        return self.config.on_spike in ("skip", "rollback")

    def add(self, norm: float) -> None:
        """Add the norm of an applied update."""
        if norm > 0:
            self._norms.append(norm)

    def restore(self, norms: Iterable[float]) -> None:
        """Replace the norms by norms of a checkpoint, oldest first."""
        self._norms = deque(norms, maxlen=self.config.spike_window)

    def state(self) -> list[float]:
        """Return the norms, oldest first."""
        return list(self._norms)
