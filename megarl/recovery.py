"""The parts of a step that need trainers. With `train.trainer_restarts` each is repeated after the trainers have failed."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.assembly import Run
from megarl.cluster.failures import WorkerFailed
from megarl.rollout.source import Batch
from megarl.step import training_step
from megarl.trainer.reference import refresh_reference_if_due
from megarl.trainer.restarts import TrainerRestarts


def train_on_next_batch(run: Run, step: int) -> None:
    """Take a batch and train on it. The batch is freed on return, before the next one is sampled."""
    with run.log.phase("gen") if run.recipe.train.source == "rollout" else run.log.phase("data"):
        batch = run.source.take(run.recipe.data.prompts_per_step)
    run.checkpoints.trained_step = None
    run.profiling.after_sampling(step)
    run.log.add(batch.metrics)
    for notice in batch.notices:
        run.log.notice(f"step {step}: {notice}")
    if batch.groups:
        with_trainers(run, step - 1, lambda: profiled_step(run, batch, step))
    else:
        run.profiling.nothing_to_compute(step)
        if run.trainer_restarts is not None:
            run.trainer_restarts.batches.keep(step, [])
        with_trainers(run, step - 1, run.devices.give_to_actor)
        run.log.warn(f"step {step}: no group with spread was found, so the policy is not updated")
        run.log.add({"actor/skipped_updates": float(run.recipe.actor.optimizer_steps)})
        run.skipped.note("actor", step, "no group with spread was found")


def profiled_step(run: Run, batch: Batch, step: int) -> None:
    """Train on `batch`, traced if the recipe wants a trace of `step`."""
    with run.profiling.training(step):
        training_step(run, batch, step)
    if run.trainer_restarts is not None:
        run.trainer_restarts.record(step, run.log.pending())


def save_step(run: Run, step: int) -> None:
    """Refresh the reference policy and save a checkpoint, if the recipe says so. Raises StopRequested after SIGTERM."""
    refresh_reference_if_due(run.actor, run.log, run.recipe.algorithm, step)
    run.checkpoints.save_if_due(step)
    if run.trainer_restarts is not None:
        run.trainer_restarts.keep_since(run.checkpoints.newest()[0])


def with_trainers(run: Run, trained: int, action: Callable[[], None]) -> None:
    """Call `action`, which needs trainers that have the weights after step `trained`.

    With `train.trainer_restarts`, a failure of a trainer starts all of them again, brings them to step `trained`, and `action` is
    called again. Raises WorkerFailed if they have failed too often.
    """
    restarts, streaks = run.trainer_restarts, run.skipped.streaks()
    if restarts is None:
        return action()
    try:
        restarts.check()
        return action()
    except WorkerFailed as error:
        failure = error
    while True:
        restarts.count(failure, trained)
        try:
            with run.log.phase("recovery"):
                restart_trainers(run, restarts, trained, failure)
            run.skipped.reset_to(streaks)  # steps that are trained again have been counted
            return action()
        except WorkerFailed as error:
            failure = error


def restart_trainers(run: Run, restarts: TrainerRestarts, trained: int, failure: WorkerFailed) -> None:
    """Start all trainers again, and train the steps from the newest checkpoint to `trained` again on their kept batches."""
    began, former_step = time.monotonic(), run.checkpoints.trained_step
    run.checkpoints.trained_step = None
    run.log.warn(f"{failure}\nThe trainers start again (train.trainer_restarts); the engines go on")
    restarts.start()
    checkpoint = run.checkpoints.restore_trainers()
    difference = 0.0
    for step in range(checkpoint + 1, trained + 1):
        groups = restarts.batches.read(step)
        with run.log.repeating() as metrics:
            if groups:
                training_step(run, Batch(groups), step)
            refresh_reference_if_due(run.actor, run.log, run.recipe.algorithm, step)
        difference = max(difference, restarts.difference(step, metrics))
        restarts.retrained += 1
    run.checkpoints.trained_step = former_step
    run.log.add(restarts.metrics())
    run.log.notice(recovered_text(checkpoint, trained, difference, time.monotonic() - began))


def recovered_text(checkpoint: int, trained: int, difference: float, seconds: float) -> str:
    """Return the notice of trainers that have started again from the step of `checkpoint`."""
    start = f"the checkpoint of step {checkpoint}" if checkpoint else "the starting model"
    text = f"the trainers have the weights after step {trained} again, {seconds:.0f} s after the failure, from {start}"
    if trained == checkpoint:
        return text
    numbers = f"their gradient norms differ by up to {difference:.2g}" if difference else "with the same gradient norms"
    return f"{text}; steps {checkpoint + 1} to {trained} were trained again on their batches, {numbers}"
