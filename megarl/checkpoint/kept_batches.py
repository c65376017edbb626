"""Batches that the trainers may need again (`train.trainer_restarts`): a folder of the run with one folder per step.

Only trainers that have died read them, while the controller lives, so files are not synced, and a new session of the run
begins with an empty folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megarl.atomic_files import disk_errors
from megarl.checkpoint.controller_state import read_group, write_group
from megarl.checkpoint.folder import checkpoint_name
from megarl.rollout.admission import TriedGroup
from megarl.types import Group


class KeptBatches:
    """The batches of the steps since the newest checkpoint, in `folder`. A thread writes them while the trainers compute."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self._writes: dict[int, Future[None]] = {}  # by step
        self._thread = ThreadPoolExecutor(1, "megarl-kept-batches")

    def __contains__(self, step: int) -> bool:
        return step in self._writes

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to write the batch of `step`, when earlier ones are written. Raises their errors, e.g. DiskFullError."""
        for write in self._writes.values():
            write.result()
        self._writes[step] = self._thread.submit(self._write, step, list(groups))

    def read(self, step: int) -> list[Group]:
        """Return the batch of `step`: equal values, and token vectors in this process."""
        self._writes[step].result()
        folder = self._path(step)
        with np.load(folder / "vectors.npz", allow_pickle=False) as vectors:
            loaded = {name: vectors[name] for name in vectors.files}
        items = json.loads((folder / "groups.json").read_text())
        return [read_group(item, loaded).group for item in items]

    def forget_through(self, step: int) -> None:
        """Delete the batches of the steps up to `step`."""
        for kept in [kept for kept in self._writes if kept <= step]:
            self._writes.pop(kept).result()
            shutil.rmtree(self._path(kept))

    def close(self) -> None:
        """Delete all batches."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / checkpoint_name(step)

    def _write(self, step: int, groups: list[Group]) -> None:
        vectors: dict[str, np.ndarray] = {}
        items = [write_group(TriedGroup(group, accepted=True), vectors) for group in groups]
        folder = self._path(step)
        with disk_errors(self.folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "groups.json").write_text(json.dumps(items))
            np.savez(folder / "vectors.npz", **vectors)  # type: ignore[arg-type]
