"""Batches that the trainers may need again: a folder of the run with one folder per step, since the newest checkpoint.

With `train.trainer_restarts` alone only trainers that have died read them, while the controller lives: files are not synced, and a
new session of the run begins with an empty folder. With `train.journal` a new controller reads them, too: each folder is synced,
has a manifest, and is renamed when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megarl.atomic_files import atomic_directory, disk_errors
from megarl.checkpoint.controller_state import read_group, write_group
from megarl.checkpoint.folder import checkpoint_name
from megarl.checkpoint.manifest import write_manifest
from megarl.rollout.admission import TriedGroup
from megarl.types import Group


class KeptBatches:
    """The batches of the steps since the newest checkpoint, in `folder`. A thread writes them while the trainers compute.

    durable: they survive the death of the controller and of its machine. earlier: steps with batches that an earlier session has
    written, and which are used; all other files in `folder` are deleted.
    """

    def __init__(self, folder: Path, *, durable: bool = False, earlier: Collection[int] = ()) -> None:
        self.folder, self._durable = folder, durable
        self._writes: dict[int, Future[None]] = {}  # by step
        self._left_out: set[int] = set()
        if not earlier:
            shutil.rmtree(folder, ignore_errors=True)
        for path in list(folder.iterdir()) if earlier else ():
            if path.name not in map(checkpoint_name, earlier):
                shutil.rmtree(path)
        for step in earlier:
            self._writes[step] = Future()
            self._writes[step].set_result(None)
        self._thread = ThreadPoolExecutor(1, "megarl-kept-batches")

    def __contains__(self, step: int) -> bool:
        return step in self._writes or step in self._left_out

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to write the batch of `step`, when earlier ones are written. Raises their errors, e.g. DiskFullError."""
        self.wait()
        self._writes[step] = self._thread.submit(self._write, step, list(groups))

    def wait(self) -> None:
        """Wait until all batches are written. Raises the errors of failed writes."""
        for write in self._writes.values():
            write.result()

    def leave_out(self, steps: Collection[int]) -> None:
        """Read the batches of `steps` as empty: the trainers have gone back to the weights before them."""
        self._left_out |= set(steps)

    @property
    def left_out(self) -> list[int]:
        """Steps with batches that are read as empty, in order."""
        return sorted(self._left_out)

    def read(self, step: int) -> list[Group]:
        """Return the batch of `step`: equal values, and token vectors in this process."""
        if step in self._left_out:
            return []
        self._writes[step].result()
        folder = self._path(step)
        with np.load(folder / "vectors.npz", allow_pickle=False) as vectors:
            loaded = {name: vectors[name] for name in vectors.files}
        items = json.loads((folder / "groups.json").read_text())
        return [read_group(item, loaded).group for item in items]

    def forget_through(self, step: int) -> None:
        """Delete the batches of the steps up to `step`."""
        self._left_out = {later for later in self._left_out if later > step}
        for kept in [kept for kept in self._writes if kept <= step]:
            self._writes.pop(kept).result()
            shutil.rmtree(self._path(kept))

    def close(self, *, keep: bool = False) -> None:
        """End the thread. Delete all batches; with `keep` only the ones that are not written yet."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / checkpoint_name(step)

    def _write(self, step: int, groups: list[Group]) -> None:
        with disk_errors(self.folder):
            if not self._durable:
                self._path(step).mkdir(parents=True, exist_ok=True)
                return self._fill(self._path(step), groups)
            with atomic_directory(self._path(step)) as partial:
                self._fill(partial, groups)
                write_manifest(partial, {})

    def _fill(self, folder: Path, groups: list[Group]) -> None:
        vectors: dict[str, np.ndarray] = {}
        items = [write_group(TriedGroup(group, accepted=True), vectors) for group in groups]
        (folder / "groups.json").write_text(json.dumps(items))
        np.savez(folder / "vectors.npz", **vectors)  # type: ignore[arg-type]
