"""Buckets as safetensors files in a directory: a slow transport for debugging, since every file can be inspected."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.atomic_files import give_default_mode
from megarl.weight_sync.full.buckets import BucketEntry, tensor_in
from megarl.weight_sync.session import WeightSyncError

_KEPT = 2  # versions: the engines' current one and the previous one
_VERSION = "version-{:08d}"


class BucketFiles:
    """The sender's files. `directory`: on a file system that every receiver shares."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._version, self._buckets = -1, 0

    def write(self, version: int, entries: list[BucketEntry], memory: torch.Tensor) -> str:
        """Write a packed bucket to a file and return its path. Deletes all but the last two versions, of earlier runs too."""
        folder = self._directory / _VERSION.format(version)
        try:
            if version != self._version:
                self._version, self._buckets = version, 0
                self._begin(folder)
            path = folder / f"bucket-{self._buckets:06d}.safetensors"
            self._buckets += 1
            save_file({entry.name: tensor_in(memory, entry) for entry in entries}, path)
            give_default_mode(path)  # an engine may run as another user
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"a bucket of {len(memory):,} bytes could not be written to {folder} ({error}); two versions of the whole "
                f"model must fit there: set another weight_sync.directory, or set weight_sync.transport=auto"
            ) from error
        return str(path)

    def _begin(self, folder: Path) -> None:
        if folder.exists():  # from a run that later resumed at an earlier step
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        old = set(self._directory.glob("version-????????")) - {folder}
        oldest_first = sorted(old, key=lambda path: (path < folder, path))  # higher versions are from an older run
        for path in oldest_first[: 1 - _KEPT]:
            shutil.rmtree(path, ignore_errors=True)  # users may delete them, too


def read(path: str, entries: list[BucketEntry], memory: torch.Tensor) -> torch.Tensor:
    """Read a bucket into `memory` (uint8), as it was packed, and return it.

    Raises WeightSyncError if the file cannot be read or lacks a tensor. The bucket's fingerprint detects changed bytes.
    """
    memory.zero_()  # the gaps between tensors
    try:
        with safe_open(path, "pt") as file:
            for entry in entries:
                tensor_in(memory, entry).copy_(file.get_tensor(entry.name))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightSyncError(
            f"{path}, which the sender wrote, cannot be read here ({error}); weight_sync.directory must be on a file system "
            f"that trainers and engines share"
        ) from error
    return memory
