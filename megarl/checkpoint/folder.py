"""Checkpoint folders of a run: atomic commit, search for the newest intact one, and retention.

A checkpoint is a folder `step_000123` with the trainers' files (`trainer/`), the critic's if the run has one
(`critic/`), the controller's state (`controller.json`, and `waiting.npz` for groups that were sampled but not yet trained
on), and `manifest.json`, which lists every file with size and checksum and is written last. The folder is written as
`.step_000123.partial` and renamed when complete; it is also renamed before it is deleted. A folder named `step_...` is
therefore complete even if the run was killed at any moment, and later damage is detected through the manifest.
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

from megarl.atomic_files import sync, write_synced
from megarl.checkpoint.manifest import FileSum, find_damage, write_manifest
from megarl.rollout.admission import TriedGroup
from megarl.types import Group, InlineData, Sample, SampleFailure, SampleImages, SampleTokens, ToolUse, Turn

_NAME = re.compile(r"step_(\d{6,})$")
_VECTORS = ("tokens", "loss_mask", "rollout_log_probs", "routed_experts")
_IMAGES = ("pixels", "grids", "starts")


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


def resume_hint(folder: Path, resume: str) -> str:
    """Return the last line of a failed run: its last intact checkpoint and how to resume from it.

    Checks only the presence and size of files. `resume`: the run's `train.resume`.
    """
    key = "" if resume == "auto" else " with train.resume=auto"
    for path in reversed(list_checkpoints(folder)):
        if find_damage(path, checksums=False) is None:
            return (
                f"Last intact checkpoint: step {checkpoint_step(path)}, {path}. Resume from it: the same command{key}."
            )
    if resume not in ("never", "auto"):
        return f"No checkpoint was written to {folder} after {resume}; the same command resumes from that one again."
    return f"No checkpoint was written to {folder}: the same command{key} starts over (train.save_every writes them)."


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


def begin(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Create the partial folder of `step`, write the controller's `state` into it and return its path.

    `state`: plain values and a SampleSource's state. Deletes partial folders of killed runs.
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
    """Raise RuntimeError if `folder`'s disk has fewer than `needed` bytes free, before anything is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        kept = ", ".join(path.name for path in list_checkpoints(folder)) or "none yet"
        raise RuntimeError(
            f"the checkpoint of step {step} needs {needed} bytes, and the disk of {folder} has {free} free. Nothing was "
            f"written; earlier checkpoints are unchanged ({kept}). Free some space and resume with train.resume=auto."
        )


def commit(folder: Path, step: int, files: dict[str, FileSum]) -> Path:
    """Write the manifest and rename the partial folder of `begin`. `files`: sums of the files already on disk."""
    partial, final = partial_path(folder, step), folder / checkpoint_name(step)
    write_manifest(partial, files)
    for directory in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync(directory)  # makes the file names durable
    assert not final.exists(), f"{final} exists, although a resume moves later checkpoints aside"
    partial.rename(final)
    sync(folder)
    return final


def retain(folder: Path, keep: int, keep_every: int) -> None:
    """Delete all checkpoints except the newest `keep` and each `keep_every`-th step's (0: none)."""
    for old in list_checkpoints(folder)[:-keep]:
        if not (keep_every and checkpoint_step(old) % keep_every == 0):
            _delete(old)


def _delete(path: Path) -> None:
    """Rename and delete a checkpoint, so that a kill during deletion leaves no incomplete `step_...` folder."""
    shutil.rmtree(path.rename(path.parent / f".{path.name}.deleted"))


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the controller's state from a checkpoint, as passed to `begin`."""
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
    write_synced(folder / "waiting.npz", file.getvalue())
    write_synced(folder / "controller.json", json.dumps(plain).encode())


def _write_group(item: TriedGroup, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    group = item.group
    texts = []
    for index, sample in enumerate(group.samples[0].data.get()):
        texts.append({"text": sample.text, "reason": sample.reason, "turns": [asdict(turn) for turn in sample.turns]})
        for name in _VECTORS:
            if (vector := getattr(sample, name)) is not None:
                vectors[f"{group.number}.{index}.{name}"] = vector
        if sample.images is not None:  # shared by all samples of the group
            vectors.update({f"{group.number}.images.{name}": getattr(sample.images, name) for name in _IMAGES})
    samples = [{**asdict(_without_data(sample)), "data": None} for sample in group.samples]
    return {
        "accepted": item.accepted,
        "words": texts,  # empty if the vectors of a filtered group were freed
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
            "waiting groups in this checkpoint were written by an earlier megarl with another text format: resume with that "
            "version, or start a new run from its exported weights"
        )
    if f"{number}.images.{_IMAGES[0]}" in vectors:
        images = SampleImages(**{name: vectors[f"{number}.images.{name}"] for name in _IMAGES})
    data = InlineData(
        [
            SampleTokens(
                text=texts["text"],
                reason=texts["reason"],
                turns=tuple(Turn(**turn) for turn in texts["turns"]),
                images=images,
                **{name: vectors[key] for name in _VECTORS if (key := f"{number}.{index}.{name}") in vectors},
            )
            for index, texts in enumerate(item["words"])
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
    steps = tuple((token, reward) for token, reward in values.get("steps", ()))  # JSON has no tuples
    tool_use = ToolUse(**values["tool_use"]) if values.get("tool_use") else None
    return Sample(**{**values, "data": data, "steps": steps, "tool_use": tool_use})


def _without_data(sample: Sample) -> Sample:
    return Sample(**{**sample.__dict__, "data": InlineData([])})
