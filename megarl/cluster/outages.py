"""Outages of a service outside the run (a reward service, a tool, an MCP server): a pure state machine without a clock.

    up --calls fail--> down --the service answers--> up

A single failed call may be the fault of its sample. So a service is down in three cases:

- It fails to answer a probe: a request that has nothing to do with the sample, or one that it has answered before.
- Without a probe: calls for two rows fail, and it answers none in between.
- It asks for a wait, and has answered no call since the failed one began.

While it is down, calls wait, and probes test it at growing intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a first repetition, of a probe or a call; at most
ROWS = 2  # rows with failed calls, and no answer in between, that make an outage of a service without a probe


def wait_before(repetition: int) -> float:
    """Return the seconds to wait before repetition number `repetition`, from 0, of something that has failed."""
    return min(FIRST_WAIT * 2.0 ** min(repetition, 30), LONGEST_WAIT)


@dataclass(frozen=True)
class Outage:
    """A service that is down, for `seconds` since its first failed call. `cause`: of its last failed call."""

    service: str
    seconds: float
    cause: str


class OutageState:
    """State machine of the module's docstring, for one service. `now`: seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self.is_down = False
        self.answered_at = -math.inf  # the last answer
        self._since: float | None = None  # first failed call or probe after the last answer
        self._rows: set[str] = set()  # of the failed calls after the last answer
        self._cause = ""
        self._probes, self._next_probe = 0, 0.0  # probes of this outage, and the time of the next

    def answer(self, now: float) -> None:
        """Record that the service has answered a call or a probe: it is up."""
        self.is_down, self.answered_at, self._since = False, now, None
        self._rows.clear()

    def fail(
        self, row: str, cause: str, began: float, now: float, *, after: float = 0.0, has_probe: bool = False
    ) -> None:
        """Record that a call for `row`, begun at `began`, has failed. `after`: seconds of waiting that the service asks for.
        `has_probe`: the caller probes the service before it blames it."""
        self._note(cause, now)
        self._rows.add(row)
        if (after > 0 and self.answered_at < began) or (not has_probe and len(self._rows) >= ROWS):
            self._go_down(now)
        if self.is_down:
            self._next_probe = max(self._next_probe, now + after)

    def fail_probe(self, cause: str, began: float, now: float) -> None:
        """Record a failed probe that began at `began`. It has no effect if the service has answered a call since then."""
        if self.answered_at < began:
            self._note(cause, began)
            self._go_down(now)

    def begin_probe(self, now: float) -> None:
        """Record that a probe of a service that is down begins. The wait before the next one is twice as long."""
        self._probes += 1
        self._next_probe = max(self._next_probe, now + wait_before(self._probes))

    def seconds_to_probe(self, now: float) -> float:
        """Return the seconds until the next probe of a service that is down."""
        return max(0.0, self._next_probe - now)

    def outage(self, service: str, now: float) -> Outage | None:
        """Return the outage of `service`; None if it is up."""
        if not self.is_down or self._since is None:
            return None
        return Outage(service, now - self._since, self._cause)

    def _note(self, cause: str, since: float) -> None:
        self._cause = cause
        self._since = since if self._since is None else self._since

    def _go_down(self, now: float) -> None:
        if not self.is_down:
            self.is_down, self._probes = True, 0
            self._next_probe = now + wait_before(0)
