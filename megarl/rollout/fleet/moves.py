"""Move groups from engines that die or leave to the others."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from megarl.rollout.admission import Admission
from megarl.rollout.begun_groups import BegunGroups
from megarl.rollout.dispatch import Dispatch
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.fleet.owners import GroupOwners
from megarl.rollout.requests import Requests
from megarl.types import Partial


class GroupMoves:
    """Decides what a failed call or a leaving engine means for the groups of the engine.

    Callers have the lock `change` where it says so. It is taken before the fleet's.
    """

    def __init__(
        self,
        engines: Sequence[SamplingEngine],
        fleet: Fleet | None,
        admission: Admission,
        dispatch: Dispatch,
        begun: BegunGroups,
        requests: Requests,
        change: threading.Condition,
        start_groups: Callable[[], None],
        fail: Callable[[BaseException], None],
        *,
        cannot_continue: str | None,
        finishes_first: bool,
    ) -> None:
        """start_groups: starts groups that were lost; called with the lock. fail: receives errors that end the run.
        cannot_continue: why samples cannot be continued by another engine, if they cannot. finishes_first: they are not, even if they
        could, since their tokens would depend on the move (`rollout.at_update: drain`)."""
        self.owners = GroupOwners()
        self._engines, self._fleet, self._admission, self._dispatch = engines, fleet, admission, dispatch
        self._begun, self._requests, self._change = begun, requests, change
        self._start_groups, self._fail = start_groups, fail
        self._cannot_continue, self._finishes_first = cannot_continue, finishes_first

    def process(self, engine: int) -> int:
        """Return the number of an engine's process."""
        return self._fleet.process(engine) if self._fleet is not None else 0

    def groups_by_engine(self) -> Counter[int]:
        """Return the number of groups that each engine samples or scores. Callable from any thread."""
        with self._change:
            return self.owners.counts()

    def versions_by_engine(self) -> list[int | None]:
        """Return the version of the weights of each engine that samples; others' do not count. Callable from any thread."""
        with self._change:
            return self._dispatch.versions

    def has_failed(self, engine: int, process: int, error: BaseException | None) -> bool:
        """Return whether a call has ended with an error that ends the run: not because its engine has died or left."""
        return error is not None and (self._fleet is None or not self._fleet.lost(engine, process, error))

    def has_moved(self, engine: int, process: int, group: int, error: BaseException | None) -> bool:
        """Return whether another engine samples a group, or soon will, after its `collect` has ended: it was handed over, or its
        engine has died or left. While its engine hands groups over, an error waits for the reply."""
        with self._change:
            if not self.owners.owns(group, (engine, process)):
                return True
            if error is None:
                return False
            if self.owners.hold(engine, group, error):
                return True
            if self._fleet is None or not self._fleet.lost(engine, process, error):
                return False
            if not self._fleet.in_update and not self._fleet.has_left((engine, process)):
                self.owners.count_death(group, self._engines[engine].name)
            self._sample_again([group], engine)
            return True

    def release_engines(self, *, before_update: bool = False) -> None:
        """Take the groups of engines that leave, and release engines without groups. Called in the controller's thread, about every
        second. before_update: take no groups, since their new engines would change their weights meanwhile.

        Other engines continue the samples of the groups. Where they cannot, the engine finishes its groups; if its machine ends
        soon, other engines resample them, with the same seeds.
        """
        if self._fleet is None or self._fleet.in_update:
            return
        for leaver in self._fleet.leaving():
            continues = self._cannot_continue is None and not self._finishes_first
            with self._change:
                groups = self.owners.of(leaver.engine)
                if groups and leaver.at_once and not continues:
                    self._sample_again(groups, leaver.engine)
                    groups = []
            if not groups:
                self._fleet.release(leaver)
            elif continues and not before_update and self._fleet.begin_handover(leaver):
                self.move(leaver.engine)

    def resample_lost(self) -> None:
        """Let engines sample finished groups again that were lost with the machine of their engine. Called in the controller's
        thread, about every second. The batch in training is not changed."""
        if self._fleet is None or self._fleet.in_update:
            return
        with self._change:
            if not (lost := self._admission.lost()):
                return
            self._admission.reopen(lost)
            for group in lost:
                self.owners.lose(group)
            self._fleet.count_lost(len(lost))
            self._start_groups()
            self._change.notify_all()

    def move(self, engine: int) -> None:
        """Move the groups that an engine samples to the other engines, which continue them when its reply arrives, and start no
        further group on it.

        A group that is already scored stays, and arrives. Engines must have the same weights: call from the thread that
        publishes weights, which waits for the reply (`owners.moving`). Raises RuntimeError if samples cannot be continued.
        """
        if self._cannot_continue is not None:
            raise RuntimeError(f"groups cannot move to other engines: {self._cannot_continue}")
        with self._change:
            if self._fleet is None:
                self._dispatch.close(engine)
            groups, process = self.owners.begin_move(engine), self.process(engine)
        reply = self._engines[engine].hand_over(groups)
        reply.add_done_callback(functools.partial(self._handed_over, engine, process))

    def _handed_over(self, engine: int, process: int, reply: Future[dict[int, tuple[Partial, ...]]]) -> None:
        """Start the groups elsewhere that an engine has handed over, in a thread of the transport."""
        try:
            if self._fleet is not None:
                self._fleet.end_handover((engine, process))
            with self._change:
                errors, failure = self.owners.end_move(engine), reply.exception()
                if failure is not None and self.has_failed(engine, process, failure):
                    raise failure
                for group, partials in sorted(reply.result().items()) if failure is None else []:
                    self._begun.add(group, self._requests.begun(group, partials))
                    self.give_up(group, engine)
                for group, error in errors.items():
                    if not self.has_moved(engine, process, group, error):
                        raise error
                self._start_groups()
                self._change.notify_all()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _sample_again(self, groups: Iterable[int], engine: int) -> None:
        """Let other engines sample groups from their start. Call with the lock."""
        assert self._fleet is not None
        for group in groups:
            self._fleet.count_sampled_again()
            self.give_up(group, engine)
        self._start_groups()

    def give_up(self, group: int, engine: int) -> None:
        """Record that an engine does not sample a group any more, so that another one does. Call with the lock."""
        self._dispatch.remove(engine)
        self.owners.lose(group)
