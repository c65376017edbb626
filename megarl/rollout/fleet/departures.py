"""Engines that leave a fleet: when their machines end, and whether they have handed their groups over. No clocks or threads."""

from __future__ import annotations

import math

from megarl.rollout.fleet.states import EngineStates, Member


class Departures:
    """Deadlines and hand-overs of leaving engines, in seconds of one clock. Not thread-safe: the caller needs a lock."""

    def __init__(self, states: EngineStates) -> None:
        self._states = states
        self._deadlines: dict[Member, float] = {}  # by process: time at which its machine ends
        # By process that was asked for its groups: time of the request; None: it has replied.
        self._handovers: dict[Member, float | None] = {}

    def end_machine(self, engine: int, deadline: float) -> None:
        """Record that the machine of a living engine ends at `deadline`. The earliest one counts."""
        member = self._member(engine)
        self._deadlines[member] = min(deadline, self._deadlines.get(member, math.inf))

    def on_ending_machines(self) -> list[int]:
        """Return the living engines on machines that end, after forgetting processes that have ended for another reason."""
        self._deadlines = {member: time for member, time in self._deadlines.items() if self._is_alive(member)}
        return [engine for engine, _ in self._deadlines]

    def is_overdue(self, engine: int, now: float) -> bool:
        """Return whether the machine of an engine should have ended."""
        return now > self._deadlines.get(self._member(engine), math.inf)

    def can_stay(self) -> list[int]:
        """Return the leaving engines that have not been asked for their groups, on machines that stay."""
        ending = self.on_ending_machines()
        candidates = [engine for engine in self._states.leaving if self._states.can_stay(engine)]
        return [engine for engine in candidates if self._member(engine) not in self._handovers and engine not in ending]

    def begin_handover(self, member: Member, now: float) -> bool:
        """Record the request for a leaving engine's groups; return False if it is not the first."""
        if member in self._handovers:
            return False
        self._handovers[member] = now
        return True

    def end_handover(self, member: Member) -> None:
        """Record the reply of an engine that hands its groups over."""
        if member in self._handovers:
            self._handovers[member] = None

    def silent_since(self, time: float) -> list[int]:
        """Return the engines that were asked for their groups before `time`, and have not replied."""
        return [engine for (engine, _), start in self._handovers.items() if start is not None and start < time]

    def remove(self, engine: int) -> None:
        """Forget an engine that has left."""
        member = self._member(engine)
        self._deadlines.pop(member, None)
        self._handovers.pop(member, None)

    def _member(self, engine: int) -> Member:
        return engine, self._states.process(engine)

    def _is_alive(self, member: Member) -> bool:
        return member == self._member(member[0]) and not self._states.is_dead(member[0])
