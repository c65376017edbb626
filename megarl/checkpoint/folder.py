"""A run's checkpoints: written whole or not at all, found again, and kept to a number.

A checkpoint is a folder `step_000123`: the trainers' part (`trainer/`), the critic's where there is one
(`critic/`), the controller's state (`controller.json`, and `waiting.npz` for groups that were sampled and not yet trained on), and
`manifest.json`, which lists every file with its size and checksum and is written last. It is written as
`.step_000123.partial` and renamed when complete; a folder is renamed before it is deleted, too. So
whatever moment a run is killed at, a folder `step_...` is whole, and damage to it shows in the manifest.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import sync, write_durably
from megarl.checkpoint.manifest import FileSum, find_damage, write_manifest
from megarl.rollout.admission import TriedGroup
from megarl.types import Group, InlineData, Sample, SampleFailure, SampleImages, SampleTokens, ToolUse, Turn

_NAME = re.compile(r"step_(\d{6,})$")
_VECTORS = ("tokens", "loss_mask", "rollout_log_probs", "routed_experts")
_IMAGES = ("pixels", "grids", "starts")


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.search(path.name)
    assert match is not None, path
    return int(match.group(1))


def partial_path(folder: Path, step: int) -> Path:
    """What the checkpoint of `step` is called while it is written."""
    return folder / f".{checkpoint_name(step)}.partial"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first. Each was whole when it was given its name."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir() and _NAME.match(path.name)), key=checkpoint_step)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Move checkpoints of steps after `step` into `folder`/discarded, where nothing finds them by itself.

    A run that goes on from an older checkpoint would otherwise count the abandoned ones as its newest.
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


def find_checkpoint(resume: str, folder: Path, *, checksums: bool, notice: Callable[[str], None]) -> Path | None:
    """What `train.resume` names: None for `never`, or for `auto` where there is none yet.

    `auto` is the newest whole one; what was passed over, and why, goes to `notice`. Raises ValueError for a
    path that is no whole checkpoint, and where `auto` finds checkpoints but none is whole.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _named_checkpoint(Path(resume), checksums)
    for path in sorted(folder.glob(".step_*.partial")) if folder.is_dir() else []:
        name = path.name.removeprefix(".").removesuffix(".partial")
        notice(f"{name} was still being written when the run ended: it is incomplete and is not used")
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        damage = find_damage(path, checksums=checksums)
        if damage is None:
            return path
        damaged.append(f"{path.name}: {damage}")
        notice(f"the checkpoint {path} is damaged and is not used: {damage}")
    if damaged:
        raise ValueError(
            f"train.resume is auto, and no checkpoint in {folder} is whole ({'; '.join(damaged)}). Bring one back from "
            "a copy, or start anew with another name=..."
        )
    return None


def how_to_go_on(folder: Path, resume: str) -> str:
    """A line for the end of a run that failed, with `train.resume` as given: its last whole checkpoint, by presence and sizes
    of files, and how to go on from there."""
    key = "" if resume == "auto" else " with train.resume=auto"
    for path in reversed(list_checkpoints(folder)):
        if find_damage(path, checksums=False) is None:
            return f"Last whole checkpoint: step {checkpoint_step(path)}, {path}. Go on from it: the same command{key}."
    if resume not in ("never", "auto"):
        return f"No checkpoint was written to {folder} after {resume}, from which the same command goes on again."
    return f"No checkpoint was written to {folder}: the same command{key} begins anew (train.save_every writes them)."


def _named_checkpoint(path: Path, checksums: bool) -> Path:
    if _NAME.search(path.name) is None:
        raise ValueError(
            f"train.resume is {str(path)!r}: that is neither never, auto nor a checkpoint (.../step_000010)"
        )
    if not path.is_dir():
        raise ValueError(f"train.resume: there is no checkpoint {path}")
    check_whole(path, checksums=checksums)
    return path


def check_whole(path: Path, *, checksums: bool = True) -> None:
    """Raise ValueError where a checkpoint is damaged, naming the file."""
    if damage := find_damage(path, checksums=checksums):
        raise ValueError(f"the checkpoint {path} is damaged: {damage}. Use another one.")


def begin(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Begin the checkpoint of `step` with the controller's `state` (a Source's state beside plain values).

    Returns the folder that the rest is to be written into. What a killed run left half-done is deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.deleted")]:
        shutil.rmtree(leftover)
    partial = partial_path(folder, step)
    partial.mkdir()
    try:
        _write_state(partial, state)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def check_room(folder: Path, step: int, needed: int) -> None:
    """Raise RuntimeError where `folder`'s disk has not so many bytes free: better before the first is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        kept = ", ".join(path.name for path in list_checkpoints(folder)) or "none yet"
        raise RuntimeError(
            f"the checkpoint of step {step} needs {needed} bytes, and the disk of {folder} has {free} free. Nothing was "
            f"written; earlier checkpoints are as they were ({kept}). Free some space and go on with train.resume=auto."
        )


def commit(folder: Path, step: int, files: dict[str, FileSum]) -> Path:
    """Make the checkpoint that `begin` began visible. `files`: sums of files that are on the disk already."""
    partial, final = partial_path(folder, step), folder / checkpoint_name(step)
    write_manifest(partial, files)
    for place in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync(place)  # the files' names
    assert not final.exists(), f"{final}: a resume sets aside what it leaves behind"
    partial.rename(final)
    sync(folder)
    return final


def retain(folder: Path, keep: int, keep_every: int) -> None:
    """Delete checkpoints but the newest `keep`, and but those of every `keep_every`-th step (0: no such)."""
    for old in list_checkpoints(folder)[:-keep]:
        if not (keep_every and checkpoint_step(old) % keep_every == 0):
            _delete(old)


def _delete(path: Path) -> None:
    """Under another name first: a kill in the middle must not leave a checkpoint that lacks some of its files."""
    shutil.rmtree(path.rename(path.parent / f".{path.name}.deleted"))


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint, as it was given to `begin`."""
    state: dict[str, Any] = json.loads((checkpoint / "controller.json").read_text())
    with np.load(checkpoint / "waiting.npz", allow_pickle=False) as vectors:
        state["source"]["gathered"] = [
            [_read_group(item, vectors) for item in batch] for batch in state["source"]["gathered"]
        ]
    return state


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    vectors: dict[str, np.ndarray] = {}
    gathered = [[_write_group(item, vectors) for item in batch] for batch in state["source"]["gathered"]]
    plain = {**state, "source": {**state["source"], "gathered": gathered}}
    file = io.BytesIO()
    np.savez(file, **vectors)  # type: ignore[arg-type]
    write_durably(folder / "waiting.npz", file.getvalue())
    write_durably(folder / "controller.json", json.dumps(plain).encode())


def _write_group(item: TriedGroup, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    group = item.group
    words = []
    for index, sample in enumerate(group.samples[0].data.get()):
        words.append({"text": sample.text, "reason": sample.reason, "turns": [asdict(turn) for turn in sample.turns]})
        for name in _VECTORS:
            if (vector := getattr(sample, name)) is not None:
                vectors[f"{group.number}.{index}.{name}"] = vector
        if sample.images is not None:  # siblings share them
            vectors.update({f"{group.number}.images.{name}": getattr(sample.images, name) for name in _IMAGES})
    samples = [{**asdict(_without_data(sample)), "data": None} for sample in group.samples]
    return {
        "accepted": item.accepted,
        "words": words,  # none where the vectors of a filtered group were let go
        "number": group.number,
        "prompt_uid": group.prompt_uid,
        "data_source": group.data_source,
        "version": group.version,
        "samples": samples,
        "greedy": {**asdict(_without_data(group.greedy)), "data": None} if group.greedy is not None else None,
        "failures": [asdict(failure) for failure in group.failures],
        "scoring_retries": group.scoring_retries,
        "judge_seconds": group.judge_seconds,
    }


def _read_group(item: dict[str, Any], vectors: Any) -> TriedGroup:
    number, images = item["number"], None
    if "words" not in item:
        raise ValueError(
            "groups that wait in this checkpoint were written by an earlier megarl, which kept their texts otherwise: resume "
            "with that version, or start a new run from its exported weights"
        )
    if f"{number}.images.{_IMAGES[0]}" in vectors:
        images = SampleImages(**{name: vectors[f"{number}.images.{name}"] for name in _IMAGES})
    data = InlineData(
        [
            SampleTokens(
                text=words["text"],
                reason=words["reason"],
                turns=tuple(Turn(**turn) for turn in words["turns"]),
                images=images,
                **{name: vectors[key] for name in _VECTORS if (key := f"{number}.{index}.{name}") in vectors},
            )
            for index, words in enumerate(item["words"])
        ]
    )
    samples = [_read_sample(values, data) for values in item["samples"]]
    greedy = _read_sample(item["greedy"], InlineData([])) if item.get("greedy") else None
    failures = tuple(SampleFailure(**failure) for failure in item.get("failures", ()))
    row = item["prompt_uid"], item["data_source"], item["version"]
    counts = item.get("scoring_retries", 0), item.get("judge_seconds", 0.0)
    group = Group(number, *row, samples, greedy, failures, *counts)
    return TriedGroup(group, item["accepted"])


def _read_sample(values: dict[str, Any], data: InlineData) -> Sample:
    steps = tuple((token, reward) for token, reward in values.get("steps", ()))  # JSON knows lists alone
    tool_use = ToolUse(**values["tool_use"]) if values.get("tool_use") else None
    return Sample(**{**values, "data": data, "steps": steps, "tool_use": tool_use})


def _without_data(sample: Sample) -> Sample:
    return Sample(**{**sample.__dict__, "data": InlineData([])})
