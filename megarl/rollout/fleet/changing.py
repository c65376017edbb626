"""Change the number of a fleet's engines while the run goes on: further ones start, others leave."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megarl.errors import pluralize
from megarl.recipe.observe import Event
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.fleet.states import EngineStates, Member

HAND_OVER_SECONDS = 30.0  # time for a leaving engine to hand its groups over; updates wait for it


@dataclass(frozen=True)
class Leaver:
    """An engine that leaves. `at_once`: its machine ends soon, so that its groups cannot finish on it."""

    engine: int
    process: int
    at_once: bool


class ChangingFleet:
    """Base class of `Fleet`: the number of its engines, which changes on request or because machines end.

    lock: hold it between a look at `serving` and a call to one of these engines, so that the call reaches this process.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        descriptions: Sequence[dict[str, Any]],
        least: int,
        end: Callable[[int], None] | None,
    ) -> None:
        """See `Fleet`."""
        self.engines, self.descriptions = list(engines), list(descriptions)
        self.lock = threading.RLock()
        self.least, self._end = least, end
        self._states = EngineStates(len(self.engines))
        self._loading: dict[int, Future[dict[str, Any]]] = {}
        self._messages: list[tuple[str, Event | None]] = []
        self._in_update = False
        self._no_machine_until: dict[int, float] = {}  # by engine: time of the next attempt to start it
        # By engine that leaves with its machine: number of its process there, and when it is ended.
        self._leave_by: dict[int, tuple[int, float]] = {}
        self._asked: set[Member] = set()  # processes of engines that leave, and have been asked for their groups
        self._handing_over: dict[Member, float] = {}  # asked processes that have not replied, and since when
        self._to_end: list[int] = []  # engines that have left, and have a process to end
        self._evaluations = 0  # that run now

    @property
    def wanted(self) -> int:
        """Number of engines that the run should have."""
        with self.lock:
            return self._states.wanted

    def set_wanted(self, target: int) -> None:
        """Change the number of engines, at the next `poll`: others start or leave. Leaving ones stay first. Callable from any
        thread."""
        with self.lock:
            self._messages.append((f"{self._states.wanted} -> {pluralize(target, 'engine')} wanted", "engines"))
            self._states.wanted = target
            self._stay(self.can_stay()[: self._states.missing()])

    def leave_machine(self, engines: Sequence[int], seconds: float) -> str | None:
        """Let `engines` leave, from the next `poll` on, since their machine ends in `seconds`; they start again on another one.
        Returns the reason if too few would be left. Callable from any thread, and again for the same engines."""
        with self.lock:
            new = [engine for engine in engines if engine not in self._leave_by and not self._states.is_dead(engine)]
            left = len(set(self._states.serving) - {*new, *self._leave_by})
            spare = [engine for engine in self.can_stay() if engine not in new]
            if new and left + len(spare) < self.least:
                left += len(spare)
                return f"{pluralize(left, 'engine')} would be left that sample, and rollout.min_engines is {self.least}"
            if new:
                self._stay(spare[: max(0, self.least - left)])
            by = time.monotonic() + seconds
            for engine, (process, earlier) in self._leave_by.items():
                if engine in engines and process == self._states.process(engine):
                    self._leave_by[engine] = process, min(by, earlier)
            self._leave_by |= {engine: (self._states.process(engine), by) for engine in new}
        return None

    def leaving(self) -> list[Leaver]:
        """Return the engines that leave and have a process."""
        with self.lock:
            return [Leaver(each, self._states.process(each), each in self._leave_by) for each in self._states.leaving]

    def can_stay(self) -> list[int]:
        """Return the leaving engines that have not been asked for their groups, on machines that stay."""
        with self.lock:
            bound_to_leave = {engine for engine, process in self._asked if process == self._states.process(engine)}
            leaving = [engine for engine in self._states.leaving if self._states.can_stay(engine)]
            return [engine for engine in leaving if engine not in bound_to_leave and engine not in self._leave_by]

    def ask_for_groups(self, leaver: Leaver) -> bool:
        """Return whether a leaving engine must be asked for its groups now, which happens once; it cannot stay any more. It is
        ended unless `handed_over` is called within `HAND_OVER_SECONDS`."""
        with self.lock:
            member = leaver.engine, leaver.process
            if leaver not in self.leaving() or member in self._asked:
                return False
            self._asked.add(member)
            self._handing_over[member] = time.monotonic()
            return True

    def handed_over(self, member: Member) -> None:
        """Record the reply of an engine that hands its groups over."""
        with self.lock:
            self._handing_over.pop(member, None)

    def has_left(self, member: Member) -> bool:
        """Return whether a process has ended because its engine left, which does not count as a death."""
        with self.lock:
            return self._states.has_left(member)

    def let_go(self, leaver: Leaver) -> None:
        """End the process of a leaving engine without groups. Call it from the controller's thread, not in an update."""
        with self.lock:
            is_current = leaver in self.leaving()
            if not is_current or (self._evaluations and not leaver.at_once):
                return
            self._has_left(leaver.engine)
        self._end_process(leaver.engine)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Mark a block as an evaluation: within it, only engines on a machine that ends leave."""
        with self.lock:
            self._evaluations += 1
        try:
            yield
        finally:
            with self.lock:
                self._evaluations -= 1

    def name(self, engine: int) -> str:
        return self.engines[engine].name if engine < len(self.engines) else f"engine{engine}"

    @property
    def states(self) -> EngineStates:
        """The engines' states. Hold the lock."""
        return self._states

    def _change_number(self) -> None:
        """Let engines leave or add some, until as many as wanted remain. Engines on a machine that ends leave in time."""
        if self._in_update:
            return
        for engine, (process, by) in list(self._leave_by.items()):
            if self._states.is_dead(engine) or self._states.process(engine) != process:
                self._leave_by.pop(engine)  # it has ended there for another reason
            elif engine not in self._states.leaving:
                self._leave(engine, returns=True)
            elif time.monotonic() > by:
                self._depart(engine)
        for member, since in list(self._handing_over.items()):
            defers = self._evaluations > 0 and member[0] not in self._leave_by
            if time.monotonic() - since > HAND_OVER_SECONDS and not defers:
                self._end_silent(member)
        for engine in self._states.surplus():
            self._leave(engine, returns=False)
        for _ in range(self._states.missing()):
            if self._states.add() == len(self.descriptions):
                self.descriptions.append({})

    def _stay(self, engines: Sequence[int]) -> None:
        """Let leaving engines serve again."""
        for engine in engines:
            self._states.stay(engine)
            self._messages.append((f"{self.name(engine)} stays", "engines"))

    def _leave(self, engine: int, *, returns: bool) -> None:
        self._no_machine_until.pop(engine, None)
        self._loading.pop(engine, None)
        why = "its machine ends" if returns else "fewer engines are wanted"
        self._messages.append((f"{self.name(engine)} leaves: {why}", "engines"))
        if not self._states.leave(engine, returns=returns):
            self._depart(engine)

    def _end_silent(self, member: Member) -> None:
        """Let an engine depart that has not handed its groups over in time."""
        del self._handing_over[member]
        engine, process = member
        if engine in self._states.leaving and process == self._states.process(engine):
            text = f"{self.name(engine)} has not handed its groups over within {HAND_OVER_SECONDS:g} s: others sample them again"
            self._messages.append((text, "warning"))
            self._depart(engine)

    def _depart(self, engine: int) -> None:
        """Record that an engine has left. `poll` ends its process."""
        self._has_left(engine)
        self._to_end.append(engine)

    def _has_left(self, engine: int) -> None:
        """Record that an engine has left; the caller ends its process, without the lock."""
        if engine in self._states.leaving:
            self._states.left(engine)
        self._leave_by.pop(engine, None)
        self._messages.append((f"{self.name(engine)} has left", "engines"))

    def _end_process(self, engine: int) -> None:
        assert self._end is not None
        if engine < len(self.engines):  # it has had a process
            self._end(engine)
