"""A run's checkpoints: written whole or not at all, found again, and kept to a number.

A checkpoint is a folder `step_000123` that holds the trainers' distributed checkpoint (`trainer/`) and
the controller's state (`controller.json`, and `waiting.npz` for groups that were sampled and not yet
trained on). It is written under another name and renamed when complete, so a folder of that name is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.durable import sync
from megarl.rollout.admission import TriedGroup
from megarl.types import Group, InlineData, Sample, SampleTokens

_NAME = re.compile(r"step_(\d{6,})$")
_VECTORS = ("tokens", "loss_mask", "rollout_log_probs", "routed_experts")


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.search(path.name)
    assert match is not None, path
    return int(match.group(1))


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first."""
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


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """What `train.resume` names: None for `never`, or for `auto` where there is none yet.

    Raises ValueError for a path that is no checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        found = list_checkpoints(folder)
        return found[-1] if found else None
    path = Path(resume)
    if _NAME.search(path.name) is None:
        raise ValueError(f"train.resume is {resume!r}: that is neither never, auto nor a checkpoint (.../step_000010)")
    if not (path / "controller.json").is_file():
        raise ValueError(f"train.resume: {path} holds no checkpoint (controller.json is missing)")
    return path


def save_checkpoint(
    folder: Path, step: int, state: dict[str, Any], keep: int, save_trainers: Callable[[Path], object]
) -> Path:
    """Write the checkpoint of `step` and delete the oldest beyond `keep`.

    `state` is a Source's state beside plain values. `save_trainers` writes into the folder it is given.
    Whatever fails, no half-written checkpoint is left behind and older ones stay.
    """
    final, partial = folder / checkpoint_name(step), folder / f".{checkpoint_name(step)}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step_*.partial"):  # of a run that was killed while it saved
        shutil.rmtree(leftover)
    partial.mkdir()
    try:
        save_trainers(partial / "trainer")
        _write_state(partial, state)
        if final.exists():  # the same step, saved before a resume from an earlier one
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint, as it was given to `save_checkpoint`."""
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
    with open(folder / "waiting.npz", "wb") as file:
        np.savez(file, **vectors)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    with open(folder / "controller.json", "w") as file:
        json.dump(plain, file)
        file.flush()
        os.fsync(file.fileno())


def _write_group(item: TriedGroup, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    group = item.group
    texts = []
    for index, sample in enumerate(group.samples[0].data.get()):
        texts.append(sample.text)
        for name in _VECTORS:
            if (vector := getattr(sample, name)) is not None:
                vectors[f"{group.number}.{index}.{name}"] = vector
    samples = [{**asdict(_without_data(sample)), "data": None} for sample in group.samples]
    return {
        "accepted": item.accepted,
        "texts": texts,  # none where the vectors of a filtered group were let go
        "number": group.number,
        "prompt_uid": group.prompt_uid,
        "data_source": group.data_source,
        "version": group.version,
        "samples": samples,
    }


def _read_group(item: dict[str, Any], vectors: Any) -> TriedGroup:
    number = item["number"]
    data = InlineData(
        [
            SampleTokens(
                text=text, **{name: vectors[key] for name in _VECTORS if (key := f"{number}.{index}.{name}") in vectors}
            )
            for index, text in enumerate(item["texts"])
        ]
    )
    samples = [Sample(**{**values, "data": data}) for values in item["samples"]]
    group = Group(number, item["prompt_uid"], item["data_source"], item["version"], samples)
    return TriedGroup(group, item["accepted"])


def _without_data(sample: Sample) -> Sample:
    return Sample(**{**sample.__dict__, "data": InlineData([])})
