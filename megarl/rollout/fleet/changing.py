"""Add or remove engines during a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.engines.base import engine_name
from megarl.errors import pluralize
from megarl.recipe.observe import Event
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.fleet.departures import Departures
from megarl.rollout.fleet.groups import EngineGroups
from megarl.rollout.fleet.states import MOST_STARTS, EngineStates, Member
from megarl.types import Metrics

HAND_OVER_SECONDS = 30.0  # time for a leaving engine to hand its groups over; updates wait for it


@dataclass(frozen=True)
class Leaver:
    """An engine that leaves. `at_once`: its machine ends soon, so that its groups cannot finish on it."""

    engine: int
    process: int
    at_once: bool


class ChangingFleet:
    """Base class of `Fleet`: the number of its engines, which changes on request or because machines end.

    An engine leaves, and gets no further group. It may stay until the hand-over of its groups begins. It is released when it has
    no groups, or removed with them: it has left, and its process is ended.

    lock: hold it between a look at `serving` and a call to one of these engines, so that the call reaches this process.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        descriptions: Sequence[dict[str, Any]],
        least: int,
        notice: Callable[[str, Event | None], None],
        end: Callable[[int], None],
        groups: EngineGroups,
    ) -> None:
        """See `Fleet`. groups: of the engines; the number of engines in groups does not change."""
        self.engines, self.descriptions = list(engines), list(descriptions)
        self.lock = threading.RLock()
        self.least, self._notice, self._end, self._groups = least, notice, end, groups
        self._states = EngineStates(len(self.engines))
        self._departures = Departures(self._states)
        self._messages: list[tuple[str, Event | None]] = []
        self._to_end: list[int] = []  # engines that have left, and have a process to end
        self._evaluations = 0  # that run now
        self._sampled_again = 0  # groups, since the last metrics
        self._recorded = [0] * len(self.engines)  # number of the process, at the last call of `take_restarted`

    @property
    def wanted(self) -> int:
        """Number of engines that the run should have."""
        with self.lock:
            return self._states.wanted

    def set_wanted(self, target: int) -> None:
        """Change the number of engines, at the next `poll`: others start or leave. Leaving ones stay first. Callable from any
        thread."""
        with self.lock:
            self._add_message(f"{self._states.wanted} -> {pluralize(target, 'engine')} wanted", "engines")
            self._states.wanted = target
            self._stay(self.can_stay()[: self._states.missing()])

    def leave_machine(self, engines: Sequence[int], seconds: float) -> str | None:
        """Let `engines` leave, from the next `poll` on, since their machine ends in `seconds`; they start again on another one.

        Returns the reason if too few would remain. Callable from any thread, and again for the same engines: the earliest end
        counts.
        """
        with self.lock:
            ending, deadline = self._departures.on_ending_machines(), time.monotonic() + seconds
            living = [engine for engine in engines if not self._states.is_dead(engine)]
            new = [engine for engine in living if engine not in ending]
            if new:
                remaining = len(set(self._states.serving) - {*new, *ending})
                spare = [engine for engine in self.can_stay() if engine not in new]
                if remaining + len(spare) < self.least:
                    text = pluralize(remaining + len(spare), "engine")
                    return f"only {text} would keep sampling, and rollout.min_engines is {self.least}"
                self._stay(spare[: max(0, self.least - remaining)])
            for engine in living:
                self._departures.end_machine(engine, deadline)
        return None

    def leaving(self) -> list[Leaver]:
        """Return the engines that leave and have a process."""
        with self.lock:
            ending = self._departures.on_ending_machines()
            return [Leaver(each, self._states.process(each), each in ending) for each in self._states.leaving]

    def can_stay(self) -> list[int]:
        """Return the leaving engines that have not been asked for their groups, on machines that stay."""
        with self.lock:
            return self._departures.can_stay()

    def begin_handover(self, leaver: Leaver) -> bool:
        """Return whether a leaving engine must be asked for its groups now, which happens once; it cannot stay any more. It is
        removed unless `end_handover` is called within `HAND_OVER_SECONDS`."""
        with self.lock:
            is_current = leaver in self.leaving()
            return is_current and self._departures.begin_handover((leaver.engine, leaver.process), time.monotonic())

    def end_handover(self, member: Member) -> None:
        """Record the reply of an engine that hands its groups over."""
        with self.lock:
            self._departures.end_handover(member)

    def has_left(self, member: Member) -> bool:
        """Return whether a process has ended because its engine left, which does not count as a death."""
        with self.lock:
            return self._states.has_left(member)

    def release(self, leaver: Leaver) -> None:
        """Remove a leaving engine without groups, and end its process. Call it from the controller's thread, not in an update."""
        with self.lock:
            is_current = leaver in self.leaving()
            if not is_current or (self._evaluations and not leaver.at_once):
                return
            self._remove(leaver.engine)
        self._end_removed()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Defer departures during an evaluation, except from machines that end."""
        with self.lock:
            self._evaluations += 1
        try:
            yield
        finally:
            with self.lock:
                self._evaluations -= 1

    @property
    def states(self) -> EngineStates:
        """The engines' states. Hold the lock."""
        return self._states

    def count_sampled_again(self) -> None:
        """Count a group of a dead engine that is sampled again from its start."""
        with self.lock:
            self._sampled_again += 1

    def count_lost(self, groups: int) -> None:
        """Count finished groups that are sampled again, since their vectors were lost with a machine."""
        with self.lock:
            self._sampled_again += groups
            text = f"the samples of {pluralize(groups, 'finished group')} were lost with a machine: other engines resample them"
            self._add_message(text, "warning")

    def take_restarted(self) -> list[int]:
        """Return the engines that have died, were ended, or were added since the last call."""
        with self.lock:
            engines = range(self._states.count)
            now = [self._states.process(engine) + self._states.is_dead(engine) for engine in engines]
            before, self._recorded = self._recorded, now
            return [engine for engine in engines if engine >= len(before) or before[engine] != now[engine]]

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call."""
        with self.lock:
            again, self._sampled_again = self._sampled_again, 0
            return {
                "fleet/serving": float(len(self._states.serving)),
                "fleet/starting": float(len(self._states.staying) - len(self._states.serving)),
                "fleet/leaving": float(len(self._states.leaving)),
                "fleet/wanted": float(self._states.wanted),
                "fleet/deaths": float(self._states.deaths),
                "fleet/sampled_again": float(again),
            }

    # --- for `Fleet`, which has the lock; except `_print` and `_end_removed` ---------------------------------------------

    def _change_number(self) -> list[int]:
        """Remove or add engines until `wanted` remain, and remove engines when their machine ends. Call it outside updates.

        Returns the engines that leave from now on.
        """
        now, departures, leaving = time.monotonic(), self._departures, list[int]()
        for engine in departures.on_ending_machines():
            if engine not in self._states.leaving:
                leaving.append(engine)
                self._leave(engine, returns=True)
            elif departures.is_overdue(engine, now):
                self._remove(engine)
        for engine in departures.silent_since(now - HAND_OVER_SECONDS):
            if not self._evaluations or engine in departures.on_ending_machines():
                text = f"has not handed its groups over within {HAND_OVER_SECONDS:g} s: other engines resample them"
                self._add_message(f"{engine_name(engine)} {text}", "warning")
                self._remove(engine)
        surplus = self._states.surplus()
        for engine in surplus:
            self._leave(engine, returns=False)
        for _ in range(self._states.missing()):
            if self._states.add() == len(self.descriptions):
                self.descriptions.append({})
        return [*leaving, *surplus]

    def _leave(self, engine: int, *, returns: bool) -> None:
        why = "its machine ends" if returns else "fewer engines are wanted"
        self._add_message(f"{engine_name(engine)} leaves: {why}", "engines")
        if not self._states.leave(engine, returns=returns):
            self._remove(engine)

    def _stay(self, engines: Sequence[int]) -> None:
        """Let leaving engines serve again."""
        for engine in engines:
            self._states.stay(engine)
            self._add_message(f"{engine_name(engine)} stays", "engines")

    def _remove(self, engine: int) -> None:
        """Record that an engine has left, with groups or without. `_end_removed` ends its process."""
        if engine in self._states.leaving:
            self._states.remove(engine)
        self._departures.remove(engine)
        self._to_end.append(engine)
        self._add_message(f"{engine_name(engine)} has left", "engines")

    def _end_removed(self) -> None:
        """End the processes of engines that have left. Without the lock: their calls fail in threads that need it."""
        with self.lock:
            engines, self._to_end = self._to_end, []
        for engine in engines:
            if engine < len(self.engines):  # it has had a process
                self._end(engine)

    def _given_up_text(self, engine: int) -> str:
        """Return the message of an engine that does not restart, with the commands that start it again."""
        states, remedy = self._states, "A restart of the run starts it again"
        text = (
            f"{engine_name(engine)} has died {MOST_STARTS} times before it sampled, and does not restart; see its log"
        )
        if self._groups.size > 1:
            return f"{text}. {remedy}."
        fewer = states.wanted - sum(states.is_dead(each) and each not in states.due for each in states.staying)
        if fewer >= self.least:
            command = "`megarl engines RUN_DIRECTORY"
            remedy += f", and so does {command} {fewer}` followed by {command} {states.wanted}`"
        return f"{text}. {remedy}."

    def _add_message(self, text: str, event: Event | None) -> None:
        """Add a message, which `_print` gives to the user."""
        self._messages.append((text, event))

    def _print(self) -> None:
        with self.lock:
            messages, self._messages = self._messages, []
        for message in messages:
            self._notice(*message)
