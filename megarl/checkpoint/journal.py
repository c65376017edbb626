"""The controller's state after the newest steps (`train.journal`), so that a resume goes on after the last step.

::

    journal/step_000123/     state after step 123, as in a checkpoint, and a manifest
    batches/step_000121/     a batch since the newest checkpoint (`KeptBatches`)

A resume loads the newest checkpoint into the trainers, trains the batches of the steps since then again without sampling, and
goes on with the state after the last of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.folder import begin, checkpoint_name, checkpoint_step, commit, list_checkpoints, retain
from megarl.checkpoint.kept_batches import KeptBatches
from megarl.checkpoint.manifest import find_damage
from megarl.errors import plain
from megarl.recipe.schema import Recipe
from megarl.recipe.text import settings_of

_STATES = 2  # that are kept: the second is used if the first is damaged
_SHOWN = 4  # settings in a notice

# Settings that decide the result of training on a kept batch, other than the ones in `identity_of`.
_TRAINING = (
    "model.dtype", "algorithm.", "actor.", "critic.", "lora.", "megatron.", "train.steps", "train.deterministic", "train.on_spike",
    "train.spike_factor", "train.spike_window", "rollout.temperature", "rollout.max_response_length",
)  # fmt: skip
# Of them: how the computation is split, which changes no number beyond rounding, and paths, which may change in a resume.
_SPLIT = re.compile(
    r"(critic\.)?megatron\.(\w+_parallel|virtual_pipeline|(first|last)_stage_layers|distributed_optimizer|recompute|keep_logits"
    r"|packing|offload|ddp)|(actor|critic)\.max_tokens_per_micro_batch|critic\.(trainers|model_path)|lora\.path"
)


def training_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide the result of training on a kept batch, and how it is split."""
    settings = settings_of(recipe)
    return {key: value for key, value in settings.items() if key.startswith(_TRAINING) or _is_split(key)}


def _is_split(key: str) -> bool:
    """Return whether a setting may change between a step and a resume that trains its batch again."""
    return key == "cluster.trainers" or _SPLIT.fullmatch(key) is not None


def _split_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if _is_split(key)}


@dataclass(frozen=True)
class JournalEntry:
    """The state in `path`, with which a resume goes on. after: step of the checkpoint before; 0: the starting model."""

    path: Path
    after: int
    left_out: tuple[int, ...]  # steps that a rollback has undone: their batches are not trained on again
    splits: tuple[dict[str, Any], ...] = ()  # settings by which the steps were split at first, of each session
    changed: tuple[str, ...] = ()  # of these settings, "key before -> now"

    @property
    def step(self) -> int:
        return checkpoint_step(self.path)

    @property
    def batches(self) -> list[int]:
        """Steps to train again on their batches."""
        return [step for step in range(self.after + 1, self.step + 1) if step not in self.left_out]


class Journal:
    """States after the newest steps, in `folder`. batches: of the steps since the newest checkpoint. settings:
    `training_settings`. earlier: the entry of an earlier session with which this one goes on; others are deleted. notice: called
    with a message for each state that could not be deleted."""

    def __init__(
        self,
        folder: Path,
        batches: KeptBatches,
        settings: dict[str, Any],
        earlier: JournalEntry | None,
        notice: Callable[[str], None],
    ) -> None:
        self.folder, self._batches, self._settings, self._notice = folder, batches, settings, notice
        self._split, self._earlier = _split_of(settings), earlier
        discard(folder, keep=earlier)

    def write(self, step: int, state: dict[str, Any], checkpoint: Path | None) -> None:
        """Write the state after `step`, when its batches are written. checkpoint: the newest. Raises DiskFullError."""
        self._batches.wait()
        base = None if checkpoint is None else str(checkpoint.resolve())
        splits = self._splits(0 if checkpoint is None else checkpoint_step(checkpoint))
        more = {"left_out": self._batches.left_out, "settings": self._settings, "splits": splits, "checkpoint": base}
        begin(self.folder, step, {**state, **more}, self._notice)
        commit(self.folder, step, {})
        retain(self.folder, _STATES, 0, self._notice)

    def _splits(self, checkpoint: int) -> list[dict[str, Any]]:
        """Return the splits of the sessions that trained the steps after `checkpoint`."""
        earlier = self._earlier.splits if self._earlier is not None and self._earlier.step > checkpoint else ()
        return [*(split for split in earlier if split != self._split), self._split]

    def forget_through(self, step: int) -> None:
        """Delete the states up to `step`, for which there is a checkpoint."""
        for path in list_checkpoints(self.folder):
            if checkpoint_step(path) <= step:
                shutil.rmtree(path)

    def close(self) -> None:
        """Delete all states: the run is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def discard(folder: Path, *, keep: JournalEntry | None = None) -> None:
    """Delete the states of an earlier session, but for `keep`."""
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in list(folder.iterdir()):
        if path.name != keep.path.name:
            shutil.rmtree(path)


@dataclass(frozen=True)
class JournalSearch:
    """Search for the entry of an earlier session. journal, batches: folders of the run. settings: of this session."""

    journal: Path
    batches: Path
    settings: dict[str, Any]
    checksums: bool
    notice: Callable[[str], None]

    def newest(self, checkpoint: Path | None, *, by_this_run: bool) -> JournalEntry | None:
        """Return the newest whole entry after `checkpoint` (None: after the starting model); None if there is none.

        by_this_run: the run itself has written the checkpoint. `notice` receives why entries are not used.
        """
        after = 0 if checkpoint is None else checkpoint_step(checkpoint)
        for path in sorted(self.journal.glob(".step_*.partial")):
            step = int(path.name.removeprefix(".step_").removesuffix(".partial"))
            self.notice(
                f"the journal of step {step} was still being written when the run ended: it is incomplete and is skipped"
            )
        for path in reversed([path for path in list_checkpoints(self.journal) if checkpoint_step(path) > after]):
            problem = find_damage(path, checksums=self.checksums)
            if problem is not None:
                self.notice(
                    f"the journal of step {checkpoint_step(path)}, {path}, is damaged and is skipped: {problem}"
                )
                continue
            state = json.loads((path / "controller.json").read_text())
            if not self._continues(state, checkpoint, by_this_run=by_this_run):
                return None
            splits, now = (
                tuple(state.get("splits", ())),
                _split_of(self.settings),
            )  # a state of an earlier version has none
            changes = dict.fromkeys(change for split in splits for change in _changes(split, now))
            entry = JournalEntry(path, after, tuple(state["left_out"]), splits, tuple(changes))
            problem = self._damaged_batch(entry)
            if problem is None:
                return entry
            self.notice(f"the journal of step {entry.step} is skipped: {problem}")
        return None

    def _continues(self, state: dict[str, Any], checkpoint: Path | None, *, by_this_run: bool) -> bool:
        """Return whether `state` continues `checkpoint` with this session's settings. Gives a notice if it does not."""
        base, step = state["checkpoint"], state["step"]
        if not by_this_run and base != (None if checkpoint is None else str(checkpoint.resolve())):
            begins = "the starting model" if base is None else base
            self.notice(f"the journal of step {step} is not used, since it begins at {begins}")
            return False
        before, now = state["settings"], self.settings
        changed = [change for key in {**before, **now} if not _is_split(key) for change in _change(key, before, now)]
        if changed:
            more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            self.notice(
                f"the journal of step {step} is not used, since its batches would be trained on with other settings: "
                f"{', '.join(changed[:_SHOWN])}{more}"
            )
        return not changed

    def _damaged_batch(self, entry: JournalEntry) -> str | None:
        for step in entry.batches:
            folder = self.batches / checkpoint_name(step)
            if not folder.exists():
                return (
                    f"the batch of step {step} is missing. A complete checkpoint of this step or a later one deletes it: that "
                    "checkpoint may be damaged or gone"
                )
            damage = find_damage(folder, checksums=self.checksums)
            if damage is not None:
                return f"the batch of step {step} is damaged: {damage}"
        return None


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [change for key in {**before, **now} for change in _change(key, before, now)]


def _change(key: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a setting that differs, "key before -> now"; [] if it does not."""
    values = before.get(key), now.get(key)
    return [] if values[0] == values[1] else [f"{key} {plain(values[0])} -> {plain(values[1])}"]


def newest_step(folder: Path) -> int | None:
    """Return the newest step in the journal in `folder`, which is not verified; None if it has none."""
    states = list_checkpoints(folder)
    return checkpoint_step(states[-1]) if states else None
