"""Loads of weights from host memory (`rollout.at_update: finish`): which engines load now, for how long, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.rollout.engine_handle import SamplingEngine
from megarl.types import Metrics


class WeightLoads:
    """Loads of a run's engines. `limit`: seconds of a load (`rollout.start_timeout`). Not thread-safe: the caller needs a lock."""

    def __init__(self, engines: Sequence[SamplingEngine], limit: float) -> None:
        self._engines, self._limit = engines, limit
        self._begins: dict[int, float] = {}  # of the engines that load now
        self._seconds = 0.0  # of all engines together, since the last metrics

    def begin(self, engine: int) -> None:
        self._begins[engine] = time.monotonic()

    def end(self, engine: int) -> None:
        self._seconds += time.monotonic() - self._begins.pop(engine)

    def check(self, since: float) -> None:
        """Raise RuntimeError if a load takes longer than the limit, counted from `since` at the earliest: while the trainers
        train, an engine of a replay may wait for the update that it loads."""
        for engine, begin in self._begins.items():
            if (seconds := time.monotonic() - max(begin, since)) > self._limit:
                raise RuntimeError(
                    f"{self._engines[engine].name} has not loaded new weights from host memory within {seconds:.0f} s "
                    "(rollout.start_timeout); see its log in the run's logs/"
                )

    def take_metrics(self, behind: int) -> Metrics:
        """Return the metrics since the last call. `behind`: engines without the newest weights."""
        seconds, self._seconds = self._seconds, 0.0
        return {"rollout/engines_behind": float(behind), "rollout/load_seconds": seconds}
