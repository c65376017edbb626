"""Checkpoint folders of a run: atomic commit, search for an intact one, retention. Tensors: `megarl/megatron/checkpoint/`.

A checkpoint is a folder `step_000123` with the trainers' files (`trainer/`), the critic's if the run has one
(`critic/`), the controller's state (see controller_state.py), and `manifest.json`, which lists every file with size and
checksum and is written last. The folder is written as `.step_000123.partial` and renamed when complete; it is also
renamed before it is deleted. A folder named `step_...` is therefore complete even if the run was killed at any moment,
and later damage is detected through the manifest.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.atomic_files import DiskFullError, disk_errors, sync
from megarl.checkpoint.controller_state import write_state
from megarl.checkpoint.manifest import FileSum, find_damage, write_manifest

_NAME = re.compile(r"step_(\d{6,})$")


class NoRoomError(DiskFullError):
    """The disk has too little space for a checkpoint, and nothing of it was written. needed: its size in bytes."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_step(path: Path) -> int:
    """Step number in a checkpoint's name."""
    match = _NAME.search(path.name)
    assert match is not None, path
    return int(match.group(1))


def partial_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of `step` while it is being written."""
    return folder / f".{checkpoint_name(step)}.partial"


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in `folder`, oldest first. They are not verified."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir() and _NAME.match(path.name)), key=checkpoint_step)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Move checkpoints of steps after `step` into `folder`/discarded and return their new paths.

    Otherwise a run that resumes from an older checkpoint would treat the abandoned ones as its newest.
    """
    moved = []
    for path in list_checkpoints(folder):
        if checkpoint_step(path) > step:
            target = folder / "discarded" / path.name
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            moved.append(path.rename(target))
    return moved


def abandoned_text(path: Path) -> str:
    """Return the notice of a checkpoint that `set_aside_later` has moved to `path`."""
    return f"a later checkpoint, which this run abandons, is kept as {path}"


def find_checkpoint(resume: str, folder: Path, *, checksums: bool, notice: Callable[[str], None]) -> Path | None:
    """Resolve `train.resume`: a path, `auto` (the newest intact checkpoint) or `never` (None).

    Returns None for `auto` in a folder without checkpoints. `notice` receives a message for each damaged checkpoint that `auto`
    skips.
    Raises ValueError if the path is not an intact checkpoint, or if `auto` finds only damaged ones.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _named_checkpoint(Path(resume), checksums)
    for path in sorted(folder.glob(".step_*.partial")) if folder.is_dir() else []:
        name = path.name.removeprefix(".").removesuffix(".partial")
        notice(f"{name} was still being written when the run ended: it is incomplete and is skipped")
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        damage = find_damage(path, checksums=checksums)
        if damage is None:
            return path
        damaged.append(f"{path.name}: {damage}")
        notice(f"the checkpoint {path} is damaged and is skipped: {damage}")
    if damaged:
        raise ValueError(
            f"train.resume is auto, and every checkpoint in {folder} is damaged ({'; '.join(damaged)}). Restore one from "
            "a copy, or start a new run with another name=..."
        )
    return None


def resume_hint(folder: Path, resume: str, save_every: int = 0) -> str:
    """Return the last line of a failed run: its last intact checkpoint and how to resume from it.

    Checks only the presence and size of files. `resume` and `save_every` are settings of `train`.
    """
    key = "" if resume == "auto" else " with train.resume=auto"
    for path in reversed(list_checkpoints(folder)):
        if find_damage(path, checksums=False) is None:
            return (
                f"Last intact checkpoint: step {checkpoint_step(path)}, {path}. Resume from it: the same command{key}."
            )
    if resume not in ("never", "auto"):
        return f"No checkpoint was written to {folder} after {resume}; the same command resumes from that one again."
    saves = f"={save_every} writes the first after step {save_every}" if save_every else " writes them"
    return f"No checkpoint was written to {folder}: the same command{key} starts over (train.save_every{saves})."


def _named_checkpoint(path: Path, checksums: bool) -> Path:
    if _NAME.search(path.name) is None:
        raise ValueError(
            f"train.resume is {str(path)!r}; it must be never, auto or the path of a checkpoint (.../step_000010)"
        )
    if not path.is_dir():
        raise ValueError(f"train.resume: the checkpoint {path} does not exist")
    check_whole(path, checksums=checksums)
    return path


def check_whole(path: Path, *, checksums: bool = True) -> None:
    """Raise ValueError with the file's name if a checkpoint is damaged."""
    if damage := find_damage(path, checksums=checksums):
        raise ValueError(f"the checkpoint {path} is damaged: {damage}. Use another one.")


def begin(folder: Path, step: int, state: dict[str, Any], notice: Callable[[str], None]) -> Path:
    """Create the partial folder of `step`, write the controller's `state` into it and return its path.

    `state`: plain values and a SampleSource's state. Deletes partial folders of killed runs and completes deletions;
    `notice` receives the failures. Raises OSError if the partial folder of `step` itself cannot be replaced, and DiskFullError.
    """
    with disk_errors(folder):
        return _begin(folder, step, state, notice)


def _begin(folder: Path, step: int, state: dict[str, Any], notice: Callable[[str], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.deleted")]:
        _delete(leftover, notice)
    partial = partial_path(folder, step)
    if partial.exists():
        shutil.rmtree(partial)  # raises the reason why it could not be deleted
    partial.mkdir()
    try:
        write_state(partial, state)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def check_room(folder: Path, step: int, needed: int) -> None:
    """Raise NoRoomError if `folder`'s disk has fewer than `needed` bytes free, before anything is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        kept = ", ".join(path.name for path in list_checkpoints(folder)) or "none yet"
        raise NoRoomError(
            f"the checkpoint of step {step} needs {needed} bytes, and the disk of {folder} has {free} free. Nothing was "
            f"written; earlier checkpoints are unchanged ({kept}). Free some space and resume with train.resume=auto.",
            needed,
        )


def commit(folder: Path, step: int, files: dict[str, FileSum]) -> Path:
    """Write the manifest and rename the partial folder of `begin`. Raises DiskFullError.

    files: sums of the files already on disk.
    """
    partial, final = partial_path(folder, step), folder / checkpoint_name(step)
    with disk_errors(folder):
        write_manifest(partial, files)
        for directory in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
            sync(directory)  # makes the file names durable
        assert not final.exists(), f"{final} exists, although a resume moves later checkpoints aside"
        partial.rename(final)
        sync(folder)
    return final


def retain(folder: Path, keep: int, keep_every: int, notice: Callable[[str], None]) -> None:
    """Delete all checkpoints except the newest `keep` and each `keep_every`-th step's (0: none).

    `notice` receives a message for each checkpoint that could not be deleted; the next save tries again.
    """
    for old in list_checkpoints(folder)[:-keep]:
        if not (keep_every and checkpoint_step(old) % keep_every == 0):
            _delete(old, notice)


def _delete(path: Path, notice: Callable[[str], None]) -> None:
    """Delete a checkpoint or a leftover of one, or give a notice.

    The folder is renamed first, so that a kill during deletion leaves no incomplete `step_...` folder.
    """
    is_leftover = path.name.startswith(".")
    try:
        shutil.rmtree(path if is_leftover else path.rename(path.parent / f".{path.name}.deleted"))
    except OSError as error:
        notice(f"{path.name} could not be deleted ({error}): it occupies disk space, and the next save tries again")
