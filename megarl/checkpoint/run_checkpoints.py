"""Save a run when it is due, at SIGTERM and after an outage, commit a save in progress when the run fails, and resume from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.algorithms.kl import KLWeight
from megarl.checkpoint.controller_state import load_state
from megarl.checkpoint.folder import abandoned_text, checkpoint_step, list_checkpoints, set_aside_later
from megarl.checkpoint.graceful_stop import GracefulStop, StopRequested
from megarl.checkpoint.journal import Journal
from megarl.checkpoint.rollbacks import Rollbacks
from megarl.checkpoint.saver import Saver
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.cluster.failures import ClusterError
from megarl.cluster.outage_watch import ServiceOutage
from megarl.observe.log import RunLog
from megarl.observe.metrics import STEP_SECONDS
from megarl.recipe.schema import TrainConfig
from megarl.rollout.source import SampleSource
from megarl.types import Metrics


def is_due(step: int, every: int) -> bool:
    """Return whether `step` is a multiple of `every`; False if `every` is 0."""
    return every > 0 and step % every == 0


@dataclass
class Checkpoints:
    """Checkpoints of a run: the weights through `saver`, the state of the controller here (source, KL weight, gradient norms, counts
    of skipped steps, spikes).

    `trained_step`: the trainers hold the weights after this step; None during an update.
    identity: model, data and seed that a checkpoint belongs to. load_weights: loads the checkpoint in all processes and
    returns their notices; a notice says that the run does not continue bit for bit.
    """

    config: TrainConfig
    saver: Saver
    source: SampleSource
    kl_weight: KLWeight
    skipped: SkippedSteps
    identity: dict[str, Any]
    load_weights: Callable[[Path], list[str | None]]
    log: RunLog
    stop: GracefulStop
    trained_step: int | None = 0
    resumed: Path | None = None  # the checkpoint with which this session began, and its step
    resumed_step: int = 0
    lost_step: int | None = None  # of a save that was lost when trainers failed
    rolled_back_step: int | None = None  # the last step after which the trainers went back to the newest checkpoint
    journal: Journal | None = None  # None: a resume goes on after the newest checkpoint
    rollbacks: Rollbacks | None = field(init=False)  # None: spikes cause no rollback

    def __post_init__(self) -> None:
        self.rollbacks = Rollbacks.of(self.config)

    def poll(self, *, wait: bool = False) -> None:
        """Commit a background save that has been written. `wait`: wait until it is."""
        if self.saver.pending:
            with self.log.phase("save"):
                self.log.add(self.saver.poll(wait=wait))

    @contextlib.contextmanager
    def saved_at_end(self, prepare: Callable[[], None]) -> Iterator[None]:
        """At SIGTERM and at ServiceOutage in the block, save; at any other end by an exception, commit the save in progress.

        prepare: called before this save, to give the devices to the trainers.
        """
        try:
            with self.stop.listening():
                try:
                    yield
                except StopRequested:
                    limit = f"; {self.stop.seconds_left:.0f} s are left (train.grace_seconds)"
                    self._save_at_stop(prepare, "SIGTERM", limit)
                    raise
                except ServiceOutage:
                    if self.config.replay is None:  # a replay saves only what the recorded run did
                        self._save_at_stop(prepare, "an outage")
                    raise
        except BaseException as error:
            self.rescue(error)
            raise

    def save_if_due(self, step: int) -> None:
        """Save after the training of `step`, if the recipe says so.

        With `train.save_at_end` the run goes on after SIGTERM in the last step, since everything is saved.
        """
        self.trained_step = step
        if step == self.config.steps and self.config.save_at_end:
            self._save(step)
            if self.stop.withdraw():
                self.log.notice(
                    "SIGTERM came in the last step: the run saves it and goes on to its end; one more SIGTERM ends it at once"
                )
        elif is_due(step, self.config.save_every):
            if self._keeps_others(step):
                why = (
                    "the trainers went back to an earlier one"
                    if self.rolled_back_step == step
                    else "no weight has changed"
                )
                self.log.notice(f"step {step}: no checkpoint, since {why}; the ones before it are kept")
            else:
                self._save(step)

    def write_journal(self, step: int) -> None:
        """Write the state after the training of `step` to the journal, unless the checkpoint of this step is complete."""
        if self.journal is None:
            return
        newest, checkpoint = self.newest()
        if newest == step:
            return
        with self.log.phase("drain"):
            self.source.drain()
        with self.log.phase("journal"):
            state = {**self._state(step), "rolled_back_step": self.rolled_back_step}
            self.journal.write(step, state, checkpoint)

    def _keeps_others(self, step: int) -> bool:
        """Return whether a checkpoint of `step` would have the weights of an earlier one, and might displace a better one."""
        return self.skipped.keeps_checkpoints or self.rolled_back_step == step

    def _save_at_stop(self, prepare: Callable[[], None], cause: str, limit: str = "") -> None:
        """Save the last trained step. A failure is a warning: the run ends anyway. limit: of the time to save, for the notice."""
        step = self.trained_step
        if step is None or step == 0:
            self.log.notice(f"stopped by {cause} before a step was complete: there is nothing to save")
            return
        try:
            self.saver.poll(wait=True)
            if self._is_saved(step):
                self.log.notice(f"stopped by {cause} after step {step}, which is saved already")
            elif self.rolled_back_step == step:
                self.log.notice(
                    f"stopped by {cause} after step {step}: the trainers went back to the checkpoint of step {self.newest()[0]}, from "
                    "which a resume continues; it repeats the steps left out"
                )
            elif self._keeps_others(step):
                self.log.notice(f"stopped by {cause} after step {step}: it is not saved, since no weight has changed")
            else:
                self.log.notice(f"{cause}: saving the checkpoint of step {step}{limit}")
                self._save(step, prepare)
                self.finish()
                self.log.notice(f"the checkpoint of step {step} was saved before the end")
        except Exception as failure:  # noqa: BLE001 -- the run ends as it would, and keeps earlier checkpoints
            self.log.warn(f"the checkpoint of step {step} could not be saved before the end: {failure}")

    def finish(self) -> None:
        """Wait for a background save. Save again if it was lost when trainers failed."""
        if self.lost_step is not None and self.lost_step == self.trained_step:
            self._save(self.lost_step)
        self.lost_step = None
        self.saver.poll(wait=True)

    def rescue(self, error: BaseException) -> None:
        """Commit the save in progress of a run that ends with `error`."""
        wait = not isinstance(error, ClusterError)  # after a ClusterError no process writes any more
        if wait and self.saver.pending:
            self.log.notice("waiting for the checkpoint in progress; another Ctrl-C or SIGTERM abandons it")
        try:
            path = self.saver.rescue(wait=wait)
        except Exception as failure:  # noqa: BLE001 -- the run ends with `error`
            self.log.warn(f"the checkpoint in progress is lost: {failure}")
            return
        if path is not None:
            self.log.notice(f"{path.name} was completed before the end")

    def newest(self, before: int | None = None) -> tuple[int, Path | None]:
        """Return step and path of the newest checkpoint of this run, or step 0 and None: the starting model.

        before: return a checkpoint of an earlier step than this. If this session resumed at or after that step, from a checkpoint of
        this run, the checkpoint may be one of an earlier session.
        """
        first = self.resumed_step if before is None or before > self.resumed_step else 0
        saved = list_checkpoints(self.saver.folder)  # the start of a resume has set later ones aside
        saved = [path for path in saved if before is None or checkpoint_step(path) < before]
        if not first and self.resumed is not None and self.resumed.parent.resolve() != self.saver.folder.resolve():
            saved = []
        if saved and checkpoint_step(saved[-1]) > first:
            return checkpoint_step(saved[-1]), saved[-1]
        return (self.resumed_step, self.resumed) if first else (0, None)

    def _is_saved(self, step: int) -> bool:
        newest = list_checkpoints(self.saver.folder)[-1:]
        return bool(newest) and checkpoint_step(newest[0]) == step

    def restore_trainers(self) -> int:
        """Load the newest checkpoint, if there is one, into the trainers. Returns its step; 0: new processes have the starting model.

        A save in progress ends first. Only the state that the trainers change is restored: weights, KL weight and gradient norms.
        """
        lost = self.saver.give_up()
        if lost is not None:
            self.lost_step, why = lost
            self.log.warn(f"the checkpoint of step {self.lost_step} is lost: {why}")
        step, checkpoint = self.newest()
        self.kl_weight.reset()
        self.skipped.restore_norms({})
        if checkpoint is not None:
            self._load(checkpoint, load_state(checkpoint))
        return step

    def _load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Load weights, KL weight and gradient norms. Says so if the run does not continue bit for bit."""
        notices = self.load_weights(checkpoint)
        self._restore_what_trainers_change(state)
        notice = next((notice for notice in notices if notice is not None), None)
        if notice is not None:
            self.log.notice(notice)

    def _restore_what_trainers_change(self, state: dict[str, Any]) -> None:
        if self.kl_weight.target is not None and state.get("kl_weight") is not None:
            self.kl_weight.value = state["kl_weight"]
        self.skipped.restore_norms(state.get("grad_norms", {}))

    def resume(self, checkpoint: Path, *, load: bool = True) -> tuple[int, Metrics | None]:
        """Restore the run. Returns the checkpoint's step, and the step's metrics if its line was never written.

        load: load the weights; False if the trainers hold them.
        """
        with self.log.phase("load"):
            state = load_state(checkpoint)
            self._begin_at(checkpoint, state, load=load)
            self.trained_step = self.resumed_step
            self._restore_counts(state)
            self.source.restore(state["source"])
        self.log.notice(f"resumed after step {state['step']} from {checkpoint}")
        return self.resumed_step, self._unlogged(state)

    def begin_at(self, checkpoint: Path | None, *, load: bool = True) -> None:
        """Load `checkpoint` into the trainers (None: they have the starting model). `go_on_with` restores the source. load: as in
        `resume`."""
        if checkpoint is not None:
            self._begin_at(checkpoint, load_state(checkpoint), load=load)

    def _begin_at(self, checkpoint: Path, state: dict[str, Any], *, load: bool) -> None:
        self.resumed, self.resumed_step = checkpoint, int(state["step"])
        if load:
            self._load(checkpoint, state)
        else:
            self._restore_what_trainers_change(state)

    def go_on_with(self, state: dict[str, Any], *, restore: bool = False) -> Metrics | None:
        """Go on with a journalled `state`: the trainers have the weights after its step. Returns the step's metrics if its line was
        never written. restore: also restore KL weight and gradient norms, which the training of its steps has not."""
        if restore:
            self._restore_what_trainers_change(state)
        self._restore_counts(state)
        self.rolled_back_step = state["rolled_back_step"]
        self.source.restore(state["source"])
        self.trained_step = int(state["step"])
        return self._unlogged(state)

    def _restore_counts(self, state: dict[str, Any]) -> None:
        """Restore the counts of skipped steps and of spikes. Checkpoints of earlier versions have none."""
        self.skipped.restore_streaks(state.get("streaks", {}))
        if self.rollbacks is not None and state.get("rollbacks") is not None:
            self.rollbacks.restore(state["rollbacks"])

    def _unlogged(self, state: dict[str, Any]) -> Metrics | None:
        return state["metrics"] if self.log.next_step == state["step"] else None

    def abandon_after(self, step: int) -> None:
        """Set aside the checkpoints of steps after `step`, from which the run goes on. It may be before the step of the resume."""
        if step < self.resumed_step:
            self.resumed, self.resumed_step = self.newest(before=step + 1)[1], step
        for path in set_aside_later(self.saver.folder, step):
            self.log.notice(abandoned_text(path))

    def _save(self, step: int, prepare: Callable[[], None] | None = None) -> None:
        """Save the weights and the controller's state (`_state`).

        prepare: set if the run ends now. Then do not wait for running groups, and call it before the weights are saved: it
        may end engines, and the state contains their samples.
        """
        if self._is_saved(step):  # trainers failed after it was written; `restore_trainers` has committed it
            return
        if prepare is None:
            with self.log.phase("drain"):
                self.source.drain()
        with self.log.phase("save"):
            state = self._state(step, interrupted=prepare is not None)
            if prepare is not None:
                prepare()
            self.log.add(self.saver.save(step, state))

    def _state(self, step: int, *, interrupted: bool = False) -> dict[str, Any]:
        """Return the controller's state after `step` as plain values. interrupted: running groups have not been waited for."""
        adapted = self.kl_weight.target is not None  # a fixed weight comes from the recipe
        return {
            "step": step,
            "identity": self.identity,
            "provenance": self.log.provenance,
            # The step's line is not written yet, and a kill must not lose it.
            "metrics": {**self.log.pending(), STEP_SECONDS: self.log.elapsed()} if self.log.next_step == step else {},
            "source": self.source.state(interrupted=interrupted),
            "kl_weight": self.kl_weight.value if adapted else None,
            "grad_norms": {role: norms.state() for role, norms in self.skipped.norms.items()},
            "streaks": self.skipped.plain_streaks(),
            "rollbacks": self.rollbacks.state() if self.rollbacks is not None else None,
        }
