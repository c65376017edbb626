"""Save checkpoints: stage, write (in the background if the recipe says so), commit, and delete old ones.

    save: write the controller's state; every trainer and critic process stages its part -> they write
    -> all receipts exist -> manifest, fsync, rename -> older checkpoints are deleted

A checkpoint has its final name from the rename on. At most one save is in progress.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.atomic_files import DiskFullError
from megarl.checkpoint import folder as checkpoint
from megarl.checkpoint.manifest import FileSum
from megarl.cluster.failures import WorkerFailed
from megarl.recipe.schema import TrainConfig
from megarl.types import Metrics

_LOOK_SECONDS = 0.2


class SavingGroup(Protocol):
    """Processes that write their parts of a checkpoint."""

    def stage_save(self, folder: Path, copy: bool) -> list[tuple[int, list[str]]]:
        """Stage each rank's part. Returns each rank's bytes to write and its receipts, as paths within `folder`."""

    def write_save(self) -> None:
        """Start writing the staged parts."""

    def save_done(self, wait: bool) -> bool:
        """Return whether all parts are on disk. `wait`: wait until they are. Raises the error of a failed write."""


class Saver:
    """Writes the checkpoints of one run into `folder`.

    groups: the processes, by the name of their folder in a checkpoint.
    check: raises if a process of the run has died; called while the saver waits for receipts.
    notice: called with a message for each old checkpoint that could not be deleted.
    onload: called with a group's name before it stages its part; None: all groups stay on their devices.
    completed: called with step and path of each checkpoint that is complete.
    """

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, SavingGroup],
        config: TrainConfig,
        check: Callable[[], None],
        notice: Callable[[str], None],
        onload: Callable[[str], None] | None = None,
        completed: Callable[[int, Path], None] | None = None,
    ) -> None:
        self.folder, self.groups, self.config = folder, groups, config
        self._check, self._notice, self._onload, self._completed = check, notice, onload, completed
        self._step: int | None = None  # of the save in progress
        self._receipts: list[Path] = []
        self._written: Written | None = None  # contents of the receipts, once read
        self._lost: tuple[int, str] | None = None  # step of a save that failed, and why, until `give_up`

    def save(self, step: int, state: dict[str, Any]) -> Metrics:
        """Write the checkpoint of `step`; with `train.save_in_background`, start writing it. Waits for an earlier save.

        Returns the metrics of `poll`. On failure the partial checkpoint is deleted and older checkpoints stay.
        """
        metrics = self.poll(wait=True)
        partial = checkpoint.begin(self.folder, step, state, self._notice)
        try:
            background = self.config.save_in_background
            checkpoint.check_room(self.folder, step, self._stage(partial))
            for group in self.groups.values():
                with _full_disks():
                    group.write_save()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._step, self._lost = step, None
        return metrics if background else metrics | self.poll(wait=True)

    def _stage(self, partial: Path) -> int:
        """Let every group stage its part. Returns the number of bytes to write."""
        copy = self.config.save_in_background or self._onload is not None  # offloaded tensors cannot be read later
        self._receipts, size = [], 0
        for name, group in self.groups.items():
            if self._onload is not None:
                self._onload(name)
            with _full_disks():
                parts = group.stage_save(partial / name, copy)
            for bytes_of_rank, receipts in parts:
                size += bytes_of_rank
                self._receipts += [partial / name / receipt for receipt in receipts]
        return size

    @property
    def pending(self) -> bool:
        """True while a save is in progress."""
        return self._step is not None

    def poll(self, *, wait: bool = False) -> Metrics:
        """Commit the save in progress if it is written. `wait`: wait until it is. Raises the error of a failed write.

        Returns metrics of the committed save: checkpoint/write_seconds (of the slowest rank) and checkpoint/bytes.
        """
        if self._step is None:
            return {}

        def commit_if_done() -> Metrics:
            with _full_disks():
                done = [group.save_done(wait) for group in self.groups.values()]  # calls every group
            return self._commit() if all(done) else {}

        return self._or_remove(commit_if_done)

    def rescue(self, *, wait: bool) -> Path | None:
        """Commit the save in progress when the run ends in the middle of a step. `wait`: wait for the writers.

        It reads receipts and calls no process, since the processes may be busy with an abandoned call.
        Returns the checkpoint; None if no save is in progress or it is not done. Raises the error of a failed write.
        """
        if self._step is None:
            return None
        path = self.folder / checkpoint.checkpoint_name(self._step)
        while self._written is None and not all(receipt.exists() for receipt in self._receipts):
            if not wait:
                return None
            self._check()
            time.sleep(_LOOK_SECONDS)
        if not path.exists():  # it exists if the interruption came right after the rename
            self._or_remove(self._commit)
        return path

    def give_up(self) -> tuple[int, str] | None:
        """End the save in progress of processes that have ended: commit it if it is written, otherwise delete it.

        Returns the step of a save that is lost, and why; None if there is none.
        """
        step, why = self._step, "it was still being written"
        if step is None:
            lost, self._lost = self._lost, None
            return lost
        try:
            written = self.rescue(wait=False)
        except Exception as error:  # noqa: BLE001 -- a failed write, in the words of its receipt
            written, why = None, str(error)
        self._step, self._written, self._lost = None, None, None
        if written is not None:
            return None
        shutil.rmtree(checkpoint.partial_path(self.folder, step), ignore_errors=True)
        return step, why

    def _or_remove(self, action: Callable[[], Metrics]) -> Metrics:
        """Return the result of `action`. If it raises, delete the partial checkpoint and end the save in progress."""
        step = self._step
        assert step is not None
        try:
            return action()
        except Exception as error:
            if isinstance(error, WorkerFailed):
                if error.failure.died:  # its part may be written; `rescue` and `give_up` look
                    raise
                self._lost = step, str(error)
            self._step, self._written = None, None
            shutil.rmtree(checkpoint.partial_path(self.folder, step), ignore_errors=True)
            raise

    def _commit(self) -> Metrics:
        """Commit the save in progress and delete old checkpoints. A failed deletion is a notice, not an error."""
        step = self._step
        assert step is not None
        if self._written is None:
            self._written = read_receipts(self._receipts, checkpoint.partial_path(self.folder, step))
        for receipt in self._receipts:
            receipt.unlink(missing_ok=True)
        checkpoint.commit(self.folder, step, self._written.files)
        written, self._written, self._step = self._written, None, None
        if self._completed is not None:
            self._completed(step, self.folder / checkpoint.checkpoint_name(step))
        checkpoint.retain(self.folder, self.config.keep_checkpoints, self.config.keep_every, self._notice)
        size = sum(size for size, _ in written.files.values())
        return {"checkpoint/write_seconds": written.seconds, "checkpoint/bytes": float(size)}


@dataclass(frozen=True)
class Written:
    """Contents of all receipts of a checkpoint."""

    files: dict[str, FileSum]  # by path within the checkpoint
    seconds: float  # of the slowest rank


@contextlib.contextmanager
def _full_disks() -> Iterator[None]:
    """Convert the WorkerFailed of a process that met a full disk to DiskFullError: no restart of it would help."""
    try:
        yield
    except WorkerFailed as error:
        kind, _, text = error.failure.cause.partition(": ")
        if kind != DiskFullError.__name__:
            raise
        raise DiskFullError(f"{error.failure.place}: {text}") from error


def read_receipts(receipts: list[Path], folder: Path) -> Written:
    """Read the receipts of the checkpoint in `folder`. Raises RuntimeError if a receipt reports a failed write."""
    files: dict[str, FileSum] = {}
    elements: dict[tuple[Path, str], tuple[int, int]] = {}  # written, expected
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
    assert not wrong, f"written and expected elements differ: {wrong}"
    return Written(files, seconds)
