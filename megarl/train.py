"""The training loop of RL, SFT and DPO, which differ in the source of the batches. With `rollout.max_staleness` the source samples ahead."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from megarl import recovery
from megarl.assembly import Run, build_run, connected
from megarl.checkpoint.journal import JournalEntry
from megarl.checkpoint.next_commands import naming_checkpoint, print_end
from megarl.cluster import is_controller, serve
from megarl.errors import as_input_error
from megarl.observe.log import RunLog
from megarl.platform.installed import full_collections_between_steps
from megarl.preflight.engines_and_devices import demand_of
from megarl.preflight.environment import environment_notices
from megarl.preflight.run_setup import prepare_run
from megarl.recipe import Recipe
from megarl.recovery import with_trainers
from megarl.step import training_step


def train(recipe: Recipe) -> Path:
    """Train `recipe` and return the run's directory.

    Raises RecipeError or InputError before any process starts, and later the error of a failed worker or engine.
    Under torchrun every rank calls this function: rank 0 is the controller, the others serve it until it is done.
    """
    if not is_controller(recipe.cluster):
        serve(recipe)
        return Path(recipe.runs_dir) / recipe.name
    with as_input_error():
        setup = prepare_run(recipe)
        recipe, place, directory = setup.recipe, setup.place, setup.place.directory
        log = RunLog(recipe, directory, place.first_step, recipe.train.steps, place.trained_steps, setup.provenance)
    with naming_checkpoint(recipe, directory), log:  # in this order: closing the log may fail on a full disk
        for notice in [*setup.notices, *environment_notices(recipe, setup.platform)]:
            log.notice(notice)
        for warning in place.warnings:
            log.warn(warning)
        with connected(recipe, setup.platform, demand_of(recipe)) as cluster:
            with log.phase("start"):
                run = build_run(setup, cluster, log)
            with run.closing():
                run_steps(run, place.checkpoint, place.journal)
                if run.exports_at_end:
                    with log.phase("export"):
                        with_trainers(run, run.last_step, lambda: run.export(directory.path / "hf"))
    print_end(recipe, directory)
    return directory.path


def run_steps(run: Run, checkpoint: Path | None = None, journal: JournalEntry | None = None) -> None:
    """Run from the first step, or from the step after a checkpoint or the journal, to `train.steps`."""
    done, unlogged_metrics = recovery.resume(run, checkpoint, journal)
    run.log.begin(earlier=recovery.take_seconds(unlogged_metrics))
    if unlogged_metrics is not None:  # the killed run had step `done`, but did not write its metrics
        run.log.add(unlogged_metrics)
        with_trainers(run, done, lambda: recovery.finish_step(run, done))
    elif done < run.recipe.train.steps:
        with_trainers(run, done, lambda: run.publish_first_weights(done))
        if run.recipe.evaluation.at_start and done == 0:
            with_trainers(run, 0, lambda: run.evaluate_policy(after_step=0))
    with run.checkpoints.saved_at_end(run.devices.reclaim), full_collections_between_steps() as collect_garbage:
        if journal is not None and done == run.recipe.train.steps:  # its save may have been lost with the controller
            with_trainers(run, done, partial(run.checkpoints.save_if_due, done))
        for step in range(done + 1, run.last_step + 1):
            run.profiling.before_sampling(step)
            run.source.admit(step - 1)
            train_on_next_batch(run, step)
            collect_garbage()
            recovery.roll_back_if_due(run, step)
            with_trainers(run, step, partial(recovery.save_step, run, step))
            if run.is_cut_off(step):
                break
            with_trainers(run, step, partial(recovery.finish_step, run, step))
            run.skipped.check(step)
        with_trainers(run, run.last_step, run.checkpoints.finish)
    run.source.close()


def train_on_next_batch(run: Run, step: int) -> None:
    """Take a batch and train on it. The batch is freed on return, before the next one is sampled."""
    batch = recovery.take_batch(run, step)
    if batch.groups:
        with_trainers(run, step - 1, lambda: recovery.traced_once(run, batch, step, training_step))
    else:
        recovery.skip_step(run, step)


class _CallableModule(ModuleType):
    __call__ = staticmethod(train)  # importing this module replaces the function `megarl.train`


sys.modules[__name__].__class__ = _CallableModule
