"""Waiting times: seconds in which trainers waited for a batch, and in which engines had no group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from megarl.types import Metrics

Reason = Literal["engines", "scorers", "window"]


class Waiting:
    """Sums of waiting times between two batches. `engines`: their number at first. `clock`: seconds.

    Call `observe` after each change. Not thread-safe: the caller needs a lock.
    """

    def __init__(self, engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._clock = engines, clock
        self._last = clock()
        self._idle = 0
        self._reason: Reason | None = None
        self._idle_seconds = self._engine_seconds = 0.0
        self._seconds: dict[Reason, float] = {"engines": 0.0, "scorers": 0.0, "window": 0.0}

    def observe(self, idle: int, reason: Reason | None, scoring: float = 0.0, engines: int | None = None) -> None:
        """Record that from now on `idle` engines have no group, and trainers wait for `reason` (None: they do not wait).
        engines: their number, if it has changed.

        `scoring`: seconds for which the group that has just arrived was scored. If trainers waited for engines meanwhile,
        they waited for scorers.
        """
        now = self._clock()
        self._idle_seconds += (now - self._last) * self._idle
        self._engine_seconds += (now - self._last) * self._engines
        if self._reason is not None:
            scored = min(scoring, now - self._last) if self._reason == "engines" else 0.0
            self._seconds["scorers"] += scored
            self._seconds[self._reason] += now - self._last - scored
        self._last, self._idle, self._reason = now, idle, reason
        self._engines = self._engines if engines is None else engines

    def metrics(self) -> Metrics:
        """Return the metrics since the last call, and start again."""
        self.observe(self._idle, self._reason)
        result: Metrics = {
            "rollout/engines_idle": self._idle_seconds / max(self._engine_seconds, 1e-9),
            "rollout/wait_seconds/engines": self._seconds["engines"],
            "rollout/wait_seconds/scorers": self._seconds["scorers"],
            "rollout/wait_seconds/window": self._seconds["window"],
        }
        self._idle_seconds = self._engine_seconds = 0.0
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return result
