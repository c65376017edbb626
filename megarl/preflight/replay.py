"""The tape of a run, and the recorded run that `train.replay` repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.atomic_files import disk_errors, write_atomically
from megarl.checkpoint.folder import checkpoint_step
from megarl.engines.tape import Record
from megarl.errors import RecipeError, plain
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.run_directory import RunPlace
from megarl.recipe.derived.at_update import is_continuous, update_rule
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.schema import Recipe
from megarl.rollout.tape import ReplayPlan, RunTape, history, segment_of_checkpoint, segments_of

# Settings that may differ between a run and its replay: they change no number.
_FREE = ("name", "runs_dir", "train.replay", "train.resume", "train.verify_checkpoints", "train.keep_checkpoints")
_FREE_SECTIONS = ("observe.",)
_SHOWN = 4  # settings in a message


def cannot_replay(recipe: Recipe) -> str | None:
    """Return why a run of `recipe` has no tape; None if it has one."""
    if recipe.train.source != "rollout" or not is_continuous(recipe):
        return "it has no requests whose weights or batches depend on time, so that it repeats without a tape"
    if update_rule(recipe) == "finish":
        return "the tape does not record when an engine loads its weights (rollout.at_update=finish)"
    if recipe.rollout.data_parallel > 1:
        return "engines of a group (rollout.data_parallel) agree on each step over the network, which the tape does not record"
    if recipe.reward.uses_judge:
        return "the judge's batches depend on time, which the tape does not record"
    return None


def replay_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield errors of `train.replay`: a recipe that has no tape, or another recipe than the recorded run's."""
    if recipe.train.replay is None:
        return
    reason = cannot_replay(recipe)
    if reason is not None:
        yield _error(recipe.train.replay, f"this recipe cannot be replayed: {reason}", "leave train.replay out")
        return
    recorded = RunDirectory(recipe.train.replay)
    plans = history(segments_of(recorded.tape))
    if not plans:
        problem = f"{recorded.path} has no tape with a whole step ({recorded.tape.name}/controller.jsonl)"
        remedy = "name the directory of a run with rollout.at_update=refresh or keep"
        yield _error(recipe.train.replay, problem, remedy)
        return
    if recorded.path.resolve() == (Path(recipe.runs_dir) / recipe.name).resolve():
        yield _error(
            recipe.train.replay,
            "a replay cannot write into the recorded run's directory",
            "set name=... or runs_dir=...",
        )
        return
    settings = [_differences(_recipe_file(recorded.tape, plan.segment.number), recipe) for plan in plans]
    if all(settings):
        yield _error(
            recipe.train.replay,
            f"the recorded run had other settings: {_shown(settings[0])}",
            "use the recipe in its tape/",
        )


def open_tape(recipe: Recipe, place: RunPlace) -> RunTape | None:
    """Return the tape that this start of the run writes; None if it has none. Creates its folder, with the recipe.

    Raises RecipeError if `train.replay` names a run that did not start after the step that this run resumes after.
    """
    if cannot_replay(recipe) is not None:
        return None
    folder = place.directory.tape
    after = 0 if place.checkpoint is None else checkpoint_step(place.checkpoint)
    resumed = None
    if place.checkpoint is not None and place.checkpoint.parent.resolve() == place.directory.checkpoints.resolve():
        resumed = segment_of_checkpoint(place.checkpoint)
    number = max((segment.number for segment in segments_of(folder)), default=-1) + 1
    header = {
        "segment": number,
        "after": after,
        "resumed": resumed,
        "unlogged": place.first_step <= after,
        "identity": place.identity,
    }
    recorded = None if recipe.train.replay is None else RunDirectory(recipe.train.replay).tape
    plan = None if recorded is None else _plan_of(recipe, recorded, header)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(_recipe_file(folder, number), to_yaml(recipe).encode())
    return RunTape(folder, header, recorded, plan)


def _plan_of(recipe: Recipe, recorded: Path, header: Record) -> ReplayPlan:
    """Return the plan of the recorded run's start that this start (`header`) repeats."""
    after, replay = header["after"], recipe.train.replay
    plans = history(segments_of(recorded))
    plan = next((plan for plan in plans if _starts_as(plan, header)), None)
    if plan is None:
        steps = sorted({plan.segment.after for plan in plans})
        starts = " and ".join(f"after step {step}" if step else "from the beginning" for step in steps)
        problem = f"this run starts after step {after}, but the recorded run started {starts}"
        remedy = "start where the recorded run started: without train.resume, or from a replay's checkpoint"
        raise _error(replay, problem, remedy)
    differences = [name for name, value in plan.segment.identity.items() if header["identity"].get(name) != value]
    if differences:
        problem = f"the recorded run had another {', '.join(differences)}"
        raise _error(replay, problem, "replay it with the model and the data that it was started with")
    settings = _differences(_recipe_file(recorded, plan.segment.number), recipe)
    if settings:
        problem = f"after step {after} the recorded run had other settings: {_shown(settings)}"
        raise _error(replay, problem, f"use {_recipe_file(recorded, plan.segment.number)}")
    return plan


def _starts_as(plan: ReplayPlan, header: Record) -> bool:
    return (plan.segment.after, plan.segment.unlogged) == (header["after"], header["unlogged"])


def _differences(recorded: Path, recipe: Recipe) -> list[str]:
    """Return the settings that differ from a recorded recipe, with both values."""
    before, now = flat_settings(recorded.read_text()), flat_settings(to_yaml(recipe))
    return [
        f"{key} {plain(before[key])} -> {plain(value)}"
        for key, value in now.items()
        if key in before and before[key] != value and key not in _FREE and not key.startswith(_FREE_SECTIONS)
    ]


def _shown(differences: list[str]) -> str:
    more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return ", ".join(differences[:_SHOWN]) + more


def _recipe_file(folder: Path, segment: int) -> Path:
    return folder / f"recipe-{segment}.yaml"


def _error(replay: str | None, problem: str, remedy: str) -> RecipeError:
    return RecipeError("train.replay", problem, remedy, value=replay)
