"""Checks of the run's directory, and the checkpoint to resume from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.folder import checkpoint_step, find_checkpoint
from megarl.checkpoint.identity import check_identity
from megarl.errors import NotHereError, RecipeError, plain, raise_all
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.derived.weight_sync_route import weights_directory
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.schema import Recipe

LEAST_FREE_BYTES = 64 << 20
_SHOWN = 8  # changed settings in a notice


@dataclass
class RunPlace:
    """The run's directory, checkpoint and first step."""

    directory: RunDirectory
    checkpoint: Path | None  # resolved from train.resume
    first_step: int  # the first step without a line in the metrics
    identity: dict[str, Any]  # identity of the run's checkpoints; see megarl/checkpoint/identity.py
    notices: list[str]  # checkpoints that were skipped, with the reason, and changed settings

    @property
    def trained_steps(self) -> int:
        """Steps of the checkpoint."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)


def open_run_directory(recipe: Recipe, identity: dict[str, Any]) -> RunPlace:
    """Create the run's directory if it is missing, and find the checkpoint to resume from. Raises as `find_place` does."""
    place = find_place(recipe, identity)
    path = place.directory.path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(recipe.runs_dir, f"{path}: {error.strerror}") from error
    if recipe.weight_sync.transport == "files":
        _make_weights_directory(recipe)
    return place


def _make_weights_directory(recipe: Recipe) -> None:
    directory = weights_directory(recipe)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name a directory that trainers can write and engines can read, or leave it out"
        problem = f"{directory}: {error.strerror}"
        raise RecipeError("weight_sync.directory", problem, remedy, value=recipe.weight_sync.directory) from error


def find_place(recipe: Recipe, identity: dict[str, Any]) -> RunPlace:
    """Return the run's directory, checkpoint and first step, without creating anything.

    Raises the errors of `run_directory_errors`, and ValueError for a checkpoint of another run or of other data.
    """
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    notices: list[str] = []
    checksums = recipe.train.verify_checkpoints == "checksums"
    checkpoint = find_checkpoint(recipe.train.resume, directory.checkpoints, checksums=checksums, notice=notices.append)
    raise_all(run_directory_errors(recipe))
    if checkpoint is None:
        return RunPlace(directory, None, 1, identity, notices)
    check_identity(checkpoint, identity)
    notices += _changed_settings(directory, recipe)
    step = checkpoint_step(checkpoint)
    is_local = checkpoint.parent.resolve() == directory.checkpoints.resolve()
    written = not is_local or any(line["step"] == step for line in read_metrics(directory.metrics))
    return RunPlace(directory, checkpoint, step + 1 if written else step, identity, notices)


def run_directory_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error if the run's directory contains another run, is not writable, or is on a full disk."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    if recipe.train.resume == "never" and directory.has_results():
        problem = f"{directory.path} already holds a run"
        remedy = "set train.resume=auto to resume it, name=... for another directory, or move it away"
        yield NotHereError("train.resume", problem, remedy, value="never")
    path = directory.path
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield _not_writable(recipe.runs_dir, f"{existing} is not a directory")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield _not_writable(recipe.runs_dir, f"{existing} is not writable")
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE_BYTES:
        problem = f"{existing} has {free >> 20} MiB free, and a run needs at least {LEAST_FREE_BYTES >> 20} MiB"
        yield RecipeError("runs_dir", problem, "free some space, or set runs_dir to another disk", value=str(path))


def _not_writable(runs_dir: str, problem: str) -> RecipeError:
    return RecipeError("runs_dir", problem, "name a directory that can be written to", value=runs_dir)


def _changed_settings(directory: RunDirectory, recipe: Recipe) -> list[str]:
    """Return a notice of the settings that changed since the run's last start; an empty list if no setting changed."""
    if not directory.recipe.is_file():
        return []
    try:
        before = flat_settings(directory.recipe.read_text())
    except yaml.YAMLError as error:
        cause = " ".join(str(error).split())
        return [f"{directory.recipe} is damaged, so settings that changed since the last start are unknown: {cause}"]
    now = flat_settings(to_yaml(recipe))
    changed = [key for key in now if key in before and before[key] != now[key] and key != "train.resume"]
    if not changed:
        return []
    shown = ", ".join(f"{key} {plain(before[key])} -> {plain(now[key])}" for key in changed[:_SHOWN])
    more = f", and {len(changed) - _SHOWN} more (recipe.resolved.yaml)" if len(changed) > _SHOWN else ""
    return [f"changed since the run was last started: {shown}{more}"]
