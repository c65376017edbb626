"""Find engines that hang: one step runs for too long, or the process does not answer. Looks are counted, not timed, so that a pause
of the controller (Ctrl-Z, a suspended machine) does not count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from megarl.rollout.fleet.states import Member

LOOKS = 4  # within `rollout.step_timeout`


class StepWatch:
    """Counts for each engine the looks in a row that see the same step. An engine without requests, in a command (an update of the
    weights, a profile) or asleep runs no step."""

    def __init__(self, limit: float, first_limit: float) -> None:
        """limit: `rollout.step_timeout`, in seconds; 0: no engine hangs. first_limit: `rollout.start_timeout`, for the first step of a
        process, which compiles what the start of the engine has not compiled."""
        self._seconds = limit / LOOKS if limit else math.inf  # between two looks
        self._first_looks = max(LOOKS, math.ceil(first_limit / self._seconds)) if limit else LOOKS
        self._seen: dict[Member, tuple[int | None, int]] = {}  # the last step seen, and the looks that saw it again
        self._pending: dict[Member, Future[int | None]] = {}
        self._next = 0.0

    def look(self, engines: Sequence[Member], ask: Callable[[int], Future[int | None]]) -> dict[Member, str]:
        """Return the engines that hang, with the cause. Call it often: it looks when a look is due, and does not wait.

        ask: requests the number of the step that an engine runs, from 1; None if it runs none.
        """
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + self._seconds
        pending, self._pending, hung = self._pending, {}, dict[Member, str]()
        for engine in engines:
            reply = pending.get(engine)
            answered = reply is not None and reply.done()
            if reply is not None and not (answered and reply.exception()):  # a call that fails is noticed elsewhere
                cause = self.record(engine, reply.result() if answered else None, answered=answered)
                if cause is not None:
                    hung[engine] = cause
                    continue
            self._pending[engine] = ask(engine[0]) if reply is None or answered else reply
        self._seen = {engine: seen for engine, seen in self._seen.items() if engine in self._pending}
        return hung

    def record(self, engine: Member, step: int | None, *, answered: bool) -> str | None:
        """Record a look at an engine's process, and return why it counts as hung, if it does. answered: since the last look."""
        last, looks = self._seen.get(engine, (None, -1))
        step = step if answered else last
        looks = looks + 1 if not answered or (step is not None and step == last) else 0
        self._seen[engine] = step, looks
        if looks < (self._first_looks if step == 1 else LOOKS):
            return None
        state = f"its step {step} has not ended" if answered else "its process has not answered"
        key = "start_timeout, for the first step" if step == 1 else "step_timeout"
        return f"it hangs: {state} for {looks * self._seconds:.0f} s (rollout.{key})"
