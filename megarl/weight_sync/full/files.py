"""Buckets as safetensors files in a directory: the slowest transport, and one whose every byte can be looked at afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.atomic_files import give_default_mode
from megarl.weight_sync.full.buckets import Entry, tensor_in
from megarl.weight_sync.session import WeightSyncError

_KEPT = 2  # versions: what engines have, and what they had before
_VERSION = "version-{:08d}"


class BucketFiles:
    """The sender's. `directory`: on a file system that every receiver sees."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._version, self._buckets = -1, 0

    def write(self, version: int, entries: list[Entry], memory: torch.Tensor) -> str:
        """A packed bucket of `version`, as a file of its own; returns where. Older versions than the last two go, also those of
        earlier runs."""
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
                f"model must fit there: name another exchange.directory, or set exchange.transport=auto"
            ) from error
        return str(path)

    def _begin(self, folder: Path) -> None:
        if folder.exists():  # of a run that went on from an earlier step
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        others = set(self._directory.glob("version-????????")) - {folder}
        oldest = sorted(others, key=lambda other: (other < folder, other))  # first those of a run that had come further
        for other in oldest[: 1 - _KEPT]:
            shutil.rmtree(other, ignore_errors=True)  # whoever looks at them may tidy up, too


def read(path: str, entries: list[Entry], memory: torch.Tensor) -> torch.Tensor:
    """A bucket as it was packed, into `memory` (uint8), which is returned. Raises WeightSyncError where the file cannot be read
    or lacks a tensor; other bytes show in the bucket's fingerprint."""
    memory.zero_()  # the gaps between tensors
    try:
        with safe_open(path, "pt") as file:
            for entry in entries:
                tensor_in(memory, entry).copy_(file.get_tensor(entry.name))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightSyncError(
            f"{path}, which the sender wrote, cannot be read here ({error}); exchange.directory has to be on a file system "
            f"that trainers and engines share"
        ) from error
    return memory
