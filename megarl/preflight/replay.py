"""The tape of a run, and the recorded run that `train.replay` repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.atomic_files import disk_errors, write_atomically
from megarl.checkpoint.folder import checkpoint_name
from megarl.engines.tape import Record
from megarl.errors import RecipeError, plain
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.run_directory import RunPlace, is_own_checkpoint
from megarl.recipe.derived.at_update import is_continuous
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings, settings_of, to_yaml
from megarl.rollout.tape import (
    TAPE_FORMAT,
    ReplayPlan,
    RunTape,
    from_journal,
    history,
    other_format,
    segment_of_checkpoint,
    segments_of,
    with_deaths,
)

# Settings that may differ between a run and its replay: they change no number.
_FREE = ("name", "runs_dir", "train.replay", "train.resume", "train.verify_checkpoints", "train.keep_checkpoints")
_FREE_SECTIONS = ("observe.",)
_SHOWN = 4  # settings in a message


def cannot_replay(recipe: Recipe) -> str | None:
    """Return why a run of `recipe` has no tape; None if it has one."""
    if recipe.train.source != "rollout" or not is_continuous(recipe):
        return "neither its weights nor its batches depend on time, so it repeats without a tape"
    if recipe.rollout.data_parallel > 1:
        return "engines of a group (rollout.data_parallel) agree on each step over the network, which the tape does not record"
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
        remedy = "name the directory of a run with rollout.at_update=finish, refresh or keep, or with rollout.admission=continuous"
        yield _error(recipe.train.replay, no_plan(recorded), remedy)
        return
    if (problem := other_format(plans)) is not None:
        yield _error(recipe.train.replay, problem, "replay it with that version of megarl")
        return
    if (problem := with_deaths(plans)) is not None:
        yield _error(recipe.train.replay, problem, "replay a run in which no engine died")
        return
    if (problem := from_journal(plans)) is not None:
        yield _error(recipe.train.replay, problem, "replay a run that has begun at a checkpoint, or at step 1")
        return
    if recorded.path.resolve() == (Path(recipe.runs_dir) / recipe.name).resolve():
        yield _error(
            recipe.train.replay,
            "a replay cannot write into the recorded run's directory",
            "set name=... or runs_dir=...",
        )
        return
    settings = [_differences(recipe_file(recorded.tape, plan.segment.number), recipe) for plan in plans]
    if all(settings):
        yield _error(
            recipe.train.replay,
            f"the recorded run had other settings: {_shown(settings[0])}",
            "use the recipe in its tape/",
        )


def no_plan(recorded: RunDirectory) -> str:
    """Return why a run without a plan cannot be repeated."""
    if (recorded.tape / "controller.jsonl").is_file():
        return f"the tape of {recorded.path} has no whole step"
    if not recorded.recipe.is_file():
        return f"{recorded.path} is not the directory of a run (it has no {recorded.recipe.name})"
    reason = cannot_replay(read_recipe(recorded.recipe).recipe)
    if reason is None:
        reason = f"it ended before its first step, or {recorded.tape.name}/controller.jsonl was deleted"
    return f"{recorded.path} has no tape: {reason}"


def open_tape(recipe: Recipe, place: RunPlace) -> RunTape | None:
    """Return the tape that this start of the run writes; None if it has none. Writes nothing.

    Raises RecipeError if `train.replay` names a run that did not start after the step that this run resumes after.
    """
    if cannot_replay(recipe) is not None:
        return None
    folder = place.directory.tape
    after, state = place.trained_steps, place.state
    saved_by, numbers = None, {segment.number for segment in segments_of(folder)}
    if state is not None and (place.journal is not None or is_own_checkpoint(place.directory, state)):
        saved_by = segment_of_checkpoint(state)
    resumed = saved_by if saved_by in numbers else None  # the tape may be lost while checkpoints remain
    number = max([-1 if saved_by is None else saved_by, *numbers]) + 1
    header = {
        "segment": number,
        "format": TAPE_FORMAT,
        "after": after,
        "resumed": resumed,
        "unlogged": place.first_step <= after,
        "journal": place.journal is not None,
        "identity": place.identity,
    }
    recorded = None if recipe.train.replay is None else RunDirectory(recipe.train.replay).tape
    plan = None if recorded is None else _plan_of(recipe, recorded, header)
    return RunTape(folder, header, recorded, plan)


def write_recipe(tape: RunTape, recipe: Recipe) -> None:
    """Create the tape's folder, with the recipe of this start. Only the run that has locked its directory may write it."""
    with disk_errors(tape.folder):
        tape.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(recipe_file(tape.folder, tape.header["segment"]), to_yaml(recipe).encode())


def _plan_of(recipe: Recipe, recorded: Path, header: Record) -> ReplayPlan:
    """Return the plan of the recorded run's start that this start (`header`) repeats."""
    after, replay = header["after"], recipe.train.replay
    plans = history(segments_of(recorded))
    start = header["after"], header["unlogged"]
    plan = next((plan for plan in plans if (plan.segment.after, plan.segment.unlogged) == start), None)
    if plan is None:
        steps = sorted({plan.segment.after for plan in plans})
        starts = " and ".join(f"after step {step}" if step else "from the beginning" for step in steps)
        problem = f"this run starts after step {after}, but the recorded run started {starts}"
        remedy = "start where the recorded run started: without train.resume, or from a replay's checkpoint"
        if plans[0].segment.after:
            first = RunDirectory(recorded.parent).checkpoints / checkpoint_name(plans[0].segment.after)
            remedy = f"start where the recorded run started: train.resume={first}, or a replay's checkpoint"
        raise _error(replay, problem, remedy)
    recorded_identity, identity = (_without_paths(each) for each in (plan.segment.identity, header["identity"]))
    differences = [name for name, value in recorded_identity.items() if identity.get(name) != value]
    if differences:
        problem = f"the recorded run had another {', '.join(differences)}"
        raise _error(replay, problem, "replay it with the model and the data that it was started with")
    settings = _differences(recipe_file(recorded, plan.segment.number), recipe)
    if settings:
        problem = f"after step {after} the recorded run had other settings: {_shown(settings)}"
        raise _error(replay, problem, f"use {recipe_file(recorded, plan.segment.number)}")
    return plan


def _without_paths(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity without the paths of its models, which may have moved: digests of the weights identify them."""
    return {
        name: {key: part for key, part in value.items() if key != "path"}
        if name in ("model", "critic") and value
        else value
        for name, value in identity.items()
    }


def _differences(recorded: Path, recipe: Recipe) -> list[str]:
    """Return the settings that differ from a recorded recipe, with both values. An older recipe may lack new settings, which
    then had their defaults."""
    now = settings_of(recipe)
    before = settings_of(Recipe()) | flat_settings(recorded.read_text())
    return [
        f"{key} {plain(before.get(key))} -> {plain(value)}"
        for key, value in now.items()
        if before.get(key) != value and key not in _FREE and not key.startswith(_FREE_SECTIONS)
    ]


def _shown(differences: list[str]) -> str:
    more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return ", ".join(differences[:_SHOWN]) + more


def recipe_file(folder: Path, segment: int) -> Path:
    """Return the file of a tape's folder with the recipe of the start `segment`."""
    return folder / f"recipe-{segment}.yaml"


def _error(replay: str | None, problem: str, remedy: str) -> RecipeError:
    return RecipeError("train.replay", problem, remedy, value=replay)
