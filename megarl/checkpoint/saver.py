"""Checkpoints of a run: taken, written beside training where asked, made visible when whole, and kept to a number.

    save: the controller's state is written and every trainer (and critic process) takes its part down -> they write
    -> every receipt is there -> manifest, fsync, rename -> older checkpoints go

A save is visible, under its own name, only from the rename on. One is under way at a time.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint import folder as checkpoint
from megarl.checkpoint.manifest import FileSum
from megarl.cluster.base import WorkerGroup
from megarl.recipe.schema import TrainConfig
from megarl.types import Metrics

_LOOK_SECONDS = 0.2


class Saver:
    """Writes the checkpoints of one run into `folder`.

    groups: the processes, by the name of their folder in a checkpoint.
    come: called with a group's name before it takes its part down, where groups take turns on the devices.
    check: raises where a process of the run has died; asked while trainers are waited for without being called.
    """

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, WorkerGroup],
        config: TrainConfig,
        check: Callable[[], None],
        come: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.groups, self.config, self._check, self._come = folder, groups, config, check, come
        self._step: int | None = None  # of the save that is under way
        self._receipts: list[Path] = []
        self._written: Written | None = None  # what they said, once read

    def save(self, step: int, state: dict[str, Any]) -> Metrics:
        """Write the checkpoint of `step`; with `train.save_in_background` only begin to. Waits for the one before.

        Returns what `poll` would. Whatever fails, nothing half-written stays, and older checkpoints do.
        """
        metrics = self.finish()
        partial = checkpoint.begin(self.folder, step, state)
        try:
            background = self.config.save_in_background
            checkpoint.check_room(self.folder, step, self._stage(partial))
            self._call("write_save")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._step = step
        return metrics if background else metrics | self.finish()

    def _stage(self, partial: Path) -> int:
        """Every group takes its part down; returns the bytes that are going to be written."""
        copy = self.config.save_in_background or self._come is not None  # what leaves the devices cannot be read there
        self._receipts, size = [], 0
        for name, workers in self.groups.items():
            if self._come is not None:
                self._come(name)
            for bytes_of_rank, receipts in workers.call("stage_save", str(partial / name), copy):
                size += bytes_of_rank
                self._receipts += [partial / name / receipt for receipt in receipts]
        return size

    def _call(self, method: str) -> list[Any]:
        return [answer for workers in self.groups.values() for answer in workers.call(method)]

    @property
    def pending(self) -> bool:
        """Whether a save is under way."""
        return self._step is not None

    def poll(self) -> Metrics:
        """Make a save visible that has been written meanwhile. Raises what one under way has failed of.

        Returns what that save cost: checkpoint/write_seconds (the slowest trainer's) and checkpoint/bytes.
        """
        if self._step is None:
            return {}
        return self._or_remove(lambda: self._commit() if all(self._call("save_done")) else {})

    def finish(self) -> Metrics:
        """As `poll`, and waits for it."""
        if self._step is None:
            return {}

        def wait() -> Metrics:
            self._call("wait_save")
            return self._commit()

        return self._or_remove(wait)

    def rescue(self, *, wait: bool) -> Path | None:
        """The run ends in mid-step: make a save visible that is under way, waiting for it where that may help.

        Trainers may be in a call that nobody will hear of, so they are not called: their receipts are looked for.
        Returns the checkpoint; None where there is none to wait for, or it is not done. Raises what it failed of.
        """
        if self._step is None:
            return None
        path = self.folder / checkpoint.checkpoint_name(self._step)
        while self._written is None and not all(receipt.exists() for receipt in self._receipts):
            if not wait:
                return None
            self._check()
            time.sleep(_LOOK_SECONDS)
        if not path.exists():  # else the end came between the rename and our knowing
            self._or_remove(self._commit)
        return path

    def _or_remove(self, action: Callable[[], Metrics]) -> Metrics:
        step = self._step
        assert step is not None
        try:
            return action()
        except Exception:
            self._step = None
            shutil.rmtree(checkpoint.partial_path(self.folder, step), ignore_errors=True)
            raise

    def _commit(self) -> Metrics:
        assert self._step is not None
        if self._written is None:
            self._written = read_receipts(self._receipts, checkpoint.partial_path(self.folder, self._step))
        for receipt in self._receipts:
            receipt.unlink(missing_ok=True)
        checkpoint.commit(self.folder, self._step, self._written.files)
        written, self._written, self._step = self._written, None, None
        checkpoint.retain(self.folder, self.config.keep_checkpoints, self.config.keep_every)
        size = sum(size for size, _ in written.files.values())
        return {"checkpoint/write_seconds": written.seconds, "checkpoint/bytes": float(size)}


@dataclass(frozen=True)
class Written:
    """What the trainers say they have written."""

    files: dict[str, FileSum]  # by path within the checkpoint
    seconds: float  # the slowest one's


def read_receipts(receipts: list[Path], folder: Path) -> Written:
    """What the receipts of a checkpoint that is written in `folder` say together.

    Raises RuntimeError where one says that writing failed.
    """
    files: dict[str, FileSum] = {}
    elements: dict[tuple[Path, str], tuple[int, int]] = {}  # written, wanted
    seconds = 0.0
    for path in receipts:
        receipt = json.loads(path.read_text())
        if "error" in receipt:
            raise RuntimeError(receipt["error"])
        place = path.parent.relative_to(folder)
        files.update({str(place / name): (size, crc) for name, (size, crc) in receipt["files"].items()})
        for name, (here, whole) in receipt["tensors"].items():
            elements[place, name] = (elements.get((place, name), (0, whole))[0] + here, whole)
        seconds = max(seconds, receipt["seconds"])
    wrong = {name: counts for (_, name), counts in elements.items() if counts[0] != counts[1]}
    assert not wrong, f"elements written, and of how many: {wrong}"
    return Written(files, seconds)
