"""What must survive a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Return once what was written to the file `path`, or renamed within the folder `path`, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whose contents are on the disk at the end. Its name is once `sync` of its folder returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def give_default_mode(path: Path) -> None:
    """Set the permissions that `open` gives a new file under this process's umask.

    safetensors writes through a private temporary file and leaves mode 0600, whatever the umask.
    """
    probe = path.with_name(f".{path.name}.mode")  # the umask itself can only be read by changing it for all threads
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    path.chmod(mode)


@contextlib.contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A folder for the block to fill, that is called `directory` once it is full and on the disk, and not before.

    Until then it is `.NAME.partial` beside it, which is deleted where the block raises; one that a killed process
    left is deleted first. A `directory` of before is replaced: until the new one has its name, the old one is there,
    for a moment as `.NAME.replaced`. Raises ValueError for a mount point, which cannot be renamed.
    """
    directory = directory.resolve()  # what a link points to is filled where it lies
    if directory.is_mount():
        raise ValueError(f"{directory} is a mount point, which cannot be renamed: choose a folder in it")
    partial, replaced = (directory.with_name(f".{directory.name}.{state}") for state in ("partial", "replaced"))
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        directory.rename(replaced)
    partial.rename(directory)
    sync(directory.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
