"""Write files and directories so that a crash or power cut never leaves a partial one, with clear disk-full errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush its contents to disk. Call `sync` on its folder to make its name durable, too."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def give_default_mode(path: Path) -> None:
    """Set the permissions of a new file under this process's umask.

    safetensors writes through a private temporary file and leaves mode 0600, independent of the umask.
    """
    probe = path.with_name(f".{path.name}.mode")  # reading the umask would change it for all threads
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    path.chmod(mode)


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder for the block to fill, then flush it to disk and rename it to `directory`.

    The temporary folder is `.NAME.partial` in the same parent. It is deleted if the block raises; one left by a killed
    process is deleted first. An existing `directory` is replaced, and stays in place until then (for a moment as
    `.NAME.replaced`). Raises ValueError for a mount point, which cannot be renamed.
    """
    directory = directory.resolve()  # for a link, replace its target
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


class DiskFullError(OSError):
    """A write failed because the disk or quota is full. The message names the file and the remedy."""


def is_disk_full(error: OSError) -> bool:
    """Return whether the disk or quota is full ("no space left", ENOSPC, or "quota exceeded", EDQUOT)."""
    return error.errno in _FULL


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert "no space left" (ENOSPC) and "quota exceeded" (EDQUOT) in the block to a `DiskFullError`."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error) or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, _full_text(path, error)) from error


def mount_point(path: Path) -> Path:
    """Return the mount point of the file system of `path`, which need not exist."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


def _full_text(path: Path, error: OSError) -> str:
    folder = path if path.is_dir() else path.parent
    usage, disk = shutil.disk_usage(folder), mount_point(folder)
    cause = "the quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
    return (
        f"{path} could not be written: {cause} (file system mounted at {disk}: {usage.free:,} of {usage.total:,} bytes "
        "free). All earlier writes are complete. Free some space there (old checkpoints are the largest files of a run; "
        "train.keep_checkpoints sets how many are kept), or move the run's directory to a larger disk and set runs_dir. "
        "Then resume with train.resume=auto."
    )


class AppendFile:
    """An append-only file with all-or-nothing writes.

    Other processes see a `write` as soon as it returns; with ``sync=True`` it also survives a power cut.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        with disk_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0)
            self._descriptor: int | None = os.open(path, flags, 0o666)  # minus the umask

    def write(self, data: bytes, *, sync: bool = False) -> None:
        """Append `data`. On an error, such as `DiskFullError`, the file is unchanged."""
        assert self._descriptor is not None, f"{self.path} is closed"
        before = os.fstat(self._descriptor).st_size
        with disk_errors(self.path):
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                if sync:
                    os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, before)
                raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Reserve:
    """Disk space reserved for a small file that must be written even if the disk is full.

    Raises `DiskFullError` if the space is not available now. On file systems that free space with a delay (some network
    file systems) the reserve has no effect.
    """

    def __init__(self, path: Path, size: int = 1 << 18) -> None:
        self._path = path
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                path.unlink()
                if error.errno not in _NO_FALLOCATE:
                    raise
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Free the space. Later calls do nothing."""
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write, then flush it to disk and rename it to `path`.

    A reader sees the old or the new file, also after a crash. The temporary file is deleted if the block raises.
    """
    part = _part(path)
    try:
        yield part
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` as `atomic_file` does."""
    with disk_errors(path), atomic_file(path) as part:
        part.write_bytes(data)


def check_target(option: str, path: Path) -> None:
    """Check before long work that its result can be written to `path`. Raises ValueError that names `option`."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder. Name a file in it, as in {path / 'page.html'}.")
    if not path.parent.is_dir():
        problem = "is a file" if path.parent.exists() else "does not exist"
        raise ValueError(f"{option} {path}: the folder {path.parent} {problem}. Create it, or choose another path.")
    part = _part(path)
    try:
        AppendFile(part, fresh=True).close()
        part.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path}: nothing can be written to the folder {path.parent} ({error.strerror}). Choose another path."
        ) from error


def check_new(option: str, path: Path) -> None:
    """Run `check_target`, and raise ValueError if the file exists: it would be overwritten."""
    check_target(option, path)
    if path.exists():
        raise ValueError(f"{option} {path} exists and would be overwritten. Choose another file, or move this one.")


def make_empty_folder(option: str, path: Path) -> None:
    """Create the folder `path` before long work that fills it, with its parents. Raises ValueError that names `option` if that
    fails, and for a file or a folder that is not empty."""
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} exists and is not empty: choose another {option}, or move it away")
    make_folder(path, f"{option} ")


def make_folder(path: Path, prefix: str = "") -> None:
    """Create the folder `path` with its parents, if it is missing. Raises ValueError, whose text begins with `prefix`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = "is a file" if path.is_file() else f"cannot be created: {error.strerror}"
        raise ValueError(f"{prefix}{path} {problem}. Choose another folder.") from error


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")
