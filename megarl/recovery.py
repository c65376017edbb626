"""Parts of a step around its training: take a batch, skip, save, publish, evaluate and log. Also the resume of a run.

These parts are repeated after trainers have failed with `train.trainer_restarts`, the trainers go back with `train.on_spike: rollback`, and with `train.journal` a
resume goes on after the last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.assembly import Run
from megarl.checkpoint.controller_state import load_state
from megarl.checkpoint.folder import checkpoint_step, list_checkpoints
from megarl.checkpoint.journal import JournalEntry
from megarl.checkpoint.run_checkpoints import is_due
from megarl.checkpoint.skipped_steps import Streak
from megarl.cluster.failures import WorkerFailed
from megarl.errors import ProcessFailure, SpoiledWeights, add_note, pluralize
from megarl.observe.metrics import STEP_SECONDS, read_metrics
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source import Batch
from megarl.step import training_step
from megarl.trainer.reference import refresh_reference_if_due
from megarl.trainer.repeatable_steps import is_rounding, norms_text
from megarl.trainer.restarts import TrainerRestarts
from megarl.types import Metrics


def take_batch(run: Run, step: int) -> Batch:
    """Return the next batch, when it has been sampled, and log its metrics and notices."""
    with run.log.phase("gen") if run.recipe.train.source == "rollout" else run.log.phase("data"):
        batch = run.source.take(run.recipe.data.prompts_per_step)
    with_trainers(run, step - 1, run.checkpoints.poll)
    run.checkpoints.trained_step = None
    run.profiling.after_sampling(step)
    run.log.add(batch.metrics)
    for notice in batch.notices:
        run.log.notice(f"step {step}: {notice}")
    return batch


def traced_once(run: Run, batch: Batch, step: int, train: Callable[[Run, Batch, int], None]) -> None:
    """Call `train`, the first training of `step`, traced if the recipe wants a trace of the step.

    After a failure of the trainers it has the kept batch: the failure may be that the machine with samples is lost.
    """
    kept = run.repeatable.batches if run.repeatable is not None else None
    if kept is not None and step in kept:
        batch = replace(batch, groups=kept.read(step))
    with run.profiling.training(step):
        train(run, batch, step)
    if run.repeatable is not None:
        run.repeatable.record(step, run.log.pending())


def skip_step(run: Run, step: int) -> None:
    """Leave the policy unchanged in `step`: its batch is empty."""
    run.profiling.nothing_to_compute(step)
    if run.repeatable is not None:
        run.repeatable.batches.keep(step, [])
    with_trainers(run, step - 1, run.devices.give_to_actor)
    run.log.warn(f"step {step}: no group with spread was found, so the policy is not updated", "update")
    run.log.add({"actor/skipped_updates": float(run.recipe.actor.optimizer_steps)})
    run.skipped.note("actor", step, "no group with spread was found")


def save_step(run: Run, step: int) -> None:
    """Refresh the reference policy, and save a checkpoint and the journal, if the recipe says so. Raises StopRequested after
    SIGTERM."""
    refresh_reference_if_due(run.actor, run.log, run.recipe.algorithm, step)
    note_held_step(run, step)
    run.checkpoints.save_if_due(step)
    run.checkpoints.write_journal(step)
    run.forget_saved_steps()
    run.checkpoints.stop.check()


def note_held_step(run: Run, step: int) -> None:
    """With `train.keep_workers`, note in the trainers that they hold the weights after `step`, for another controller."""
    if run.recipe.train.keep_workers:
        for group in filter(None, (run.actor, run.critic)):
            group.hold(step)


def take_seconds(unlogged: Metrics | None) -> float:
    """Take the seconds that an earlier process has spent on a step out of the metrics that it left of it; 0 if there are none."""
    return 0.0 if unlogged is None else unlogged.pop(STEP_SECONDS, 0.0)


def finish_step(run: Run, step: int) -> None:
    """Publish the new weights, evaluate if due, and write the step's metrics."""
    evaluation, last = run.recipe.evaluation, step == run.recipe.train.steps
    evaluates = is_due(step, evaluation.every) or (last and evaluation.at_end)
    if not last or evaluates:
        run.publish_weights(step)
    if evaluates:
        run.evaluate_policy(after_step=step)
    tokens = run.log.pending().get("perf/total_num_tokens", 0.0)
    run.log.add({"perf/throughput": tokens / run.log.elapsed() / run.device_count})
    run.machine_loads.log(run.log, filter(None, (run.actor, run.critic)), _running_engines(run))
    run.log.step(step)


def _running_engines(run: Run) -> list[EngineHandle]:
    """Return the policy's serving engines: the machine of an engine that still starts is not known yet."""
    if run.fleet is None:
        return list(run.profiling.engines)
    return [run.fleet.engines[number] for number in run.fleet.serving]


def roll_back_if_due(run: Run, step: int) -> None:
    """Go back to the newest checkpoint before the spikes if those up to `step` are too many (`train.on_spike: rollback`).

    The run goes on as if the batches since the checkpoint had been empty. Raises SpoiledWeights instead of the rollback after
    `train.rollbacks`.
    """
    rollbacks, metrics = run.checkpoints.rollbacks, run.log.pending()
    if rollbacks is None:
        return
    new = int(metrics.get("actor/spikes", 0.0) + metrics.get("critic/spikes", 0.0))
    rollbacks.note(step, new)
    if not new or not rollbacks.is_due:
        return
    with_trainers(run, step, partial(run.checkpoints.poll, wait=True))
    checkpoint, _ = run.checkpoints.newest(before=rollbacks.first_step)
    spikes = f"{pluralize(rollbacks.count, 'spike')} in {steps_text(rollbacks.first_step, step)}"
    if checkpoint == 0:
        rollbacks.forget_spikes()
        run.log.warn(f"step {step}: {spikes}, and no checkpoint before them: their updates were skipped", "update")
        return
    if not rollbacks.is_allowed(checkpoint):
        raise SpoiledWeights(f"step {step}: {spikes}, {too_many_rollbacks_text(run, checkpoint, step)}")
    run.log.warn(
        f"step {step}: {spikes}. The trainers go back to the checkpoint of step {checkpoint}, and the samples of "
        f"{steps_text(checkpoint + 1, step)} are not trained on again",
        "rollback",
    )
    rollbacks.record(checkpoint)
    run.skipped.reset_to({})  # so that train.stop_after_skipped counts steps after the rollback only
    if run.repeatable is not None:
        run.repeatable.leave_out(range(checkpoint + 1, step + 1))
    run.checkpoints.abandon_after(checkpoint)
    run.checkpoints.rolled_back_step = step
    with_trainers(run, step, partial(roll_back, run, step))
    run.log.add(rollbacks.metrics(checkpoint, step))


def roll_back(run: Run, step: int) -> None:
    """Load the newest checkpoint after `step`, and refresh the reference policy as steps without groups would have done."""
    with run.log.phase("recovery"):
        checkpoint, every = run.checkpoints.restore_trainers(), run.recipe.algorithm.refresh_reference_every
        due = [
            passed for passed in range(checkpoint + 1, step) if is_due(passed, every)
        ]  # at `step`, `save_step` does it
        if due:
            run.actor.refresh_reference(due[-1])


def too_many_rollbacks_text(run: Run, checkpoint: int, step: int) -> str:
    """Return the end of the error about spikes after `train.rollbacks` rollbacks to `checkpoint`: cause and way on."""
    train = run.recipe.train
    older = [path for path in list_checkpoints(run.checkpoints.saver.folder) if checkpoint_step(path) < checkpoint]
    place = f"from an older checkpoint, e.g. train.resume={older[-1]}, or" if older else "from it"
    return (
        f"after the trainers have gone back to the checkpoint of step {checkpoint} {pluralize(train.rollbacks, 'time')} "
        f"(train.rollbacks), and trained on other samples each time. So its weights or the settings are the cause. Check "
        f"metrics.jsonl and samples/ of {steps_text(checkpoint + 1, step)}; resume {place} with a lower actor.optimizer.lr, or with "
        "a larger train.spike_factor if the norms have grown for good."
    )


def steps_text(first: int, last: int) -> str:
    """Return the steps from `first` to `last`: "step 3", "steps 3 to 5"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def with_trainers(run: Run, trained: int, action: Callable[[], None]) -> None:
    """Call `action`, which needs trainers that have the weights after step `trained`.

    With `train.trainer_restarts`, a failure of a trainer starts all of them again, brings them to step `trained`, and `action` is
    called again. Raises WorkerFailed if they have failed too often, or if engines have parts of an update and cannot restart.
    """
    restarts = run.trainer_restarts
    if restarts is None:
        return action()
    before = StepState(run.checkpoints.trained_step, run.skipped.streaks(), run.log.pending())

    def checked_action() -> None:
        restarts.check()
        try:
            action()
        except ProcessFailure:  # an engine fails if a trainer dies while they connect
            restarts.check()
            raise

    failure = attempt(checked_action)
    while failure is not None:
        if not run.devices.outlives_trainers:
            add_note(
                failure,
                "Engines may have parts of the new weights, so the trainers do not start again; see rollout.min_engines.",
            )
            raise failure
        restarts.count(failure, trained)
        run.log.withdraw_metrics(before.metrics, phase="recovery")
        failure = attempt(lambda: restart_trainers(run, restarts, trained, before)) or attempt(checked_action)


@dataclass(frozen=True)
class StepState:
    """State of the controller before an action, to which it returns if the action fails. trained_step: see Checkpoints."""

    trained_step: int | None
    streaks: dict[str, Streak]  # of skipped steps
    metrics: Metrics  # of the step so far


def attempt(action: Callable[[], None]) -> WorkerFailed | None:
    """Call `action`. Returns the failure if it failed because of a trainer; raises other errors.

    The traceback is removed from the failure: its frames would keep the batch in memory.
    """
    try:
        action()
    except WorkerFailed as error:
        error.__context__ = None
        return error.with_traceback(None)
    return None


def restart_trainers(run: Run, restarts: TrainerRestarts, trained: int, before: StepState) -> None:
    """Start all trainers again, and train the steps from the newest checkpoint to `trained` again on their kept batches."""
    run.checkpoints.trained_step = None
    with run.log.phase("recovery"):
        began = time.monotonic()
        run.log.warn(restarts.notice, "death")
        restarts.start()
        checkpoint = run.checkpoints.restore_trainers()
        differences = train_again(run, checkpoint, trained)
        run.skipped.reset_to(before.streaks)
        run.checkpoints.trained_step = before.trained_step
        _report(run, recovered_text(checkpoint, trained, time.monotonic() - began), differences)
    run.log.add({**restarts.metrics(), **retrained_metrics(run)})


def train_again(run: Run, checkpoint: int, trained: int) -> list[float]:
    """Train the steps after `checkpoint` to `trained` again on their kept batches. The trainers have the weights of `checkpoint`.

    Returns by how much their gradient norms differ from the first ones.
    """
    assert run.repeatable is not None
    run.devices.give_to_actor()
    differences: list[float] = []
    for step in range(checkpoint + 1, trained + 1):
        groups = run.repeatable.batches.read(step)
        with run.log.repeating() as metrics:
            if groups:
                training_step(run, Batch(groups), step)
        if is_due(step, run.recipe.algorithm.refresh_reference_every):
            run.actor.refresh_reference(step)
        differences += run.repeatable.differences(step, metrics)
        run.repeatable.retrained += 1
    return differences


def retrained_metrics(run: Run) -> Metrics:
    """Return how many steps were trained again in this session."""
    return {"recovery/retrained_steps": float(run.repeatable.retrained if run.repeatable is not None else 0)}


def resume(run: Run, checkpoint: Path | None, entry: JournalEntry | None) -> tuple[int, Metrics | None]:
    """Restore the run from `checkpoint` (None: it begins with the starting model), and with `entry` from the journal after it.

    Returns the last step, and its metrics if its line was never written.
    """
    done, unlogged = _restore(run, checkpoint, entry)
    note_held_step(run, done)
    return done, unlogged


def _restore(run: Run, checkpoint: Path | None, entry: JournalEntry | None) -> tuple[int, Metrics | None]:
    outlived = run.actor.outlived_at is not None
    if outlived:
        run.log.notice(kept_text(run, run.actor.outlived_at))
    if entry is None:
        return run.checkpoints.resume(checkpoint, load=not outlived) if checkpoint is not None else (0, None)
    began = time.monotonic()
    with run.log.phase("load"):
        run.checkpoints.begin_at(checkpoint, load=not outlived)
    with run.log.phase("recovery"):
        assert run.repeatable is not None
        state = load_state(entry.path)
        run.repeatable.batches.leave_out(entry.left_out)
        for line in [*read_metrics(run.log.run_dir.metrics), {**state["metrics"], "step": entry.step}]:
            run.repeatable.record(int(line["step"]), line)
        differences = [] if outlived else train_again(run, entry.after, entry.step)
        unlogged = run.checkpoints.go_on_with(state, restore=outlived)
    run.log.add(retrained_metrics(run))
    if outlived:
        run.log.notice(f"resumed after step {entry.step} from the journal")
        return entry.step, unlogged
    text = recovered_text(entry.after, entry.step, time.monotonic() - began)
    _report(run, f"resumed after step {entry.step} from the journal: {text}", differences, entry.changed)
    return entry.step, unlogged


def _report(run: Run, text: str, differences: list[float], changed: Sequence[str] = ()) -> None:
    """Log that steps were trained again: a warning if their gradient norms differ by more than rounding (`norms_text`)."""
    dtype = run.recipe.model.dtype
    text += norms_text(differences, dtype, changed) if differences else ""
    if is_rounding(differences, dtype):
        run.log.notice(text)
    else:
        run.log.warn(text)


def kept_text(run: Run, step: int | None) -> str:
    """Return the notice of trainers, and perhaps engines, that have outlived their controller and hold the weights after `step`."""
    trainers = pluralize(sum(group.size for group in filter(None, (run.actor, run.critic))), "trainer")
    engines = pluralize(sum(engine.service.kept for engine in run.profiling.engines), "engine")
    return f"{trainers} and {engines} have outlived the controller. The trainers hold the weights after step {step}: nothing is loaded"


def recovered_text(checkpoint: int, trained: int, seconds: float) -> str:
    """Return the notice of trainers that have started again from the step of `checkpoint`."""
    start = f"the checkpoint of step {checkpoint}" if checkpoint else "the starting model"
    text = f"the trainers have the weights after step {trained} again, in {seconds:.0f} s, from {start}"
    if trained == checkpoint:
        return text
    return f"{text}; steps {checkpoint + 1} to {trained} were trained again on their batches"
