"""Checks of the run's directory, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.folder import (
    abandoned_text,
    checkpoint_step,
    find_checkpoint,
    list_checkpoints,
    set_aside_later,
)
from megarl.checkpoint.identity import check_identity
from megarl.checkpoint.journal import JournalEntry, JournalSearch, discard, newest_step, training_settings
from megarl.errors import NotHereError, RecipeError, plain, raise_all
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.derived.weight_sync_route import weights_directory
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings, settings_of

LEAST_FREE_BYTES = 64 << 20
_SHOWN = 8  # changed settings in a notice


@dataclass
class RunPlace:
    """The run's directory, checkpoint and first step."""

    directory: RunDirectory
    checkpoint: Path | None  # resolved from train.resume
    first_step: int  # the first step without a line in the metrics
    identity: dict[str, Any]  # identity of the run's checkpoints; see megarl/checkpoint/identity.py
    notices: list[str]  # changed settings
    journal: JournalEntry | None = None  # after the checkpoint, or after the starting model
    warnings: list[str] = field(default_factory=list)  # skipped checkpoints and states of the journal, with the reason

    @property
    def trained_steps(self) -> int:
        """Steps of the journal, or of the checkpoint."""
        return 0 if self.state is None else checkpoint_step(self.state)

    @property
    def resumes(self) -> tuple[int, bool]:
        """The last trained step, and whether there is a checkpoint of it, or before it."""
        return self.trained_steps, self.checkpoint is not None

    @property
    def state(self) -> Path | None:
        """The folder with the controller's state of the resume; None if the run starts at its beginning."""
        return self.checkpoint if self.journal is None else self.journal.path

    def abandon_later_steps(self, notice: Callable[[str], None]) -> None:
        """Set aside the checkpoints after the one that the run resumes from, with a notice each, and delete a journal that it does not
        use.

        Called before the trainers and engines start, so that all messages name the right checkpoint. The run's directory must be
        locked.
        """
        if self.journal is None:
            discard(self.directory.journal)
        if self.checkpoint is None:
            return
        for path in set_aside_later(self.directory.checkpoints, checkpoint_step(self.checkpoint)):
            notice(abandoned_text(path))


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

    Raises the errors of `run_directory_errors`, ValueError for a checkpoint of another run or of other data, and NotHereError if a
    run with checkpoints would begin again because none of them can be found.
    """
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    notices: list[str] = []
    warnings: list[str] = []
    checksums = recipe.train.verify_checkpoints == "checksums"
    checkpoint = find_checkpoint(
        recipe.train.resume, directory.checkpoints, checksums=checksums, notice=warnings.append
    )
    raise_all(run_directory_errors(recipe))
    if checkpoint is not None:
        check_identity(checkpoint, identity)
    journal = _find_journal(recipe, directory, checkpoint, warnings)
    place = RunPlace(directory, checkpoint, 1, identity, notices, journal, warnings)
    if place.state is None:
        if recipe.train.resume == "auto" and (reason := _sign_of_checkpoints(directory)):
            problem = (
                f"no checkpoint in {directory.checkpoints} can be used, and {directory.path} should have one: {reason}"
            )
            remedy = "restore it (is its file system mounted?), or name it in train.resume; to begin again, move the folder away or choose another name"
            raise NotHereError("train.resume", "; ".join([problem, *warnings]), remedy, value="auto")
        return place
    if place.journal is not None:
        check_identity(place.journal.path, identity)
    notices += _changed_settings(directory, recipe)
    step, is_local = place.trained_steps, place.journal is not None or is_own_checkpoint(directory, place.checkpoint)
    written = not is_local or any(line["step"] == step for line in read_metrics(directory.metrics))
    place.first_step = step + 1 if written else step
    return place


def _find_journal(
    recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, warnings: list[str]
) -> JournalEntry | None:
    """Return the entry of the journal with which the run goes on; None if there is none. Adds warnings of entries that are not used.

    With the path of a checkpoint in `train.resume` it goes on from this one, unless the journal begins there and the run has no checkpoint.
    """
    train = recipe.train
    by_this_run = is_own_checkpoint(directory, checkpoint)
    journalled = newest_step(directory.journal)
    if train.resume == "never" or journalled is None:
        return None
    if not train.journal:
        if journalled > (0 if checkpoint is None else checkpoint_step(checkpoint)):
            warnings.append(
                f"the journal up to step {journalled} is not used, and training deletes it, since train.journal is false"
            )
        return None
    if train.resume != "auto" and (by_this_run or list_checkpoints(directory.checkpoints)):
        warnings.append("the journal is not used, since train.resume names a checkpoint")
        return None
    checksums = train.verify_checkpoints == "checksums"
    search = JournalSearch(directory.journal, directory.batches, training_settings(recipe), checksums, warnings.append)
    return search.newest(checkpoint, by_this_run=by_this_run)


def _sign_of_checkpoints(directory: RunDirectory) -> str:
    """Return a sign that the run had a checkpoint: its journal begins at one, or twice `train.save_every` of its last start has passed
    (a step may be logged while its checkpoint is still being written). "" if there is none."""
    for path in list_checkpoints(directory.journal):
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged: the journal's search has reported it
            if base := json.loads((path / "controller.json").read_text())["checkpoint"]:
                return f"its journal begins at {base}"
    steps = max((int(line["step"]) for line in read_metrics(directory.metrics)), default=0)
    every = 0
    with contextlib.suppress(OSError, yaml.YAMLError):  # the settings of the last start are unknown
        every = flat_settings(directory.recipe.read_text()).get("train.save_every", 0)
    return f"it has {steps} steps, and its last start saved every {every}" if 0 < 2 * every <= steps else ""


def is_own_checkpoint(directory: RunDirectory, checkpoint: Path | None) -> bool:
    """Return whether the run in `directory` has written `checkpoint`."""
    return checkpoint is not None and checkpoint.parent.resolve() == directory.checkpoints.resolve()


def run_directory_errors(recipe: Recipe, *, resumes: bool = True) -> Iterator[RecipeError]:
    """Yield an error if the run's directory contains another run, is not writable, or is on a full disk. resumes: whether the command
    can resume a run."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    if recipe.train.resume == "never" and directory.has_results():
        problem = f"{directory.path} already holds a run"
        elsewhere = "name=... for another directory, or move it away"
        if resumes:
            yield NotHereError(
                "train.resume", problem, f"set train.resume=auto to resume it, {elsewhere}", value="never"
            )
        else:
            yield NotHereError("name", problem, f"set {elsewhere}", value=recipe.name)
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
    now = settings_of(recipe)
    changed = [key for key in now if key in before and before[key] != now[key] and key != "train.resume"]
    if not changed:
        return []
    shown = ", ".join(f"{key} {plain(before[key])} -> {plain(now[key])}" for key in changed[:_SHOWN])
    more = f", and {len(changed) - _SHOWN} more (recipe.resolved.yaml)" if len(changed) > _SHOWN else ""
    return [f"changed since the run was last started: {shown}{more}"]
