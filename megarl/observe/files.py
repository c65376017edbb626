"""Writing files that survive a crash, and saying plainly when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.atomic_files import sync

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class DiskFullError(OSError):
    """A write failed for want of space (or of quota). The text names the file and what to do."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" (ENOSPC) and "quota exceeded" (EDQUOT) inside the block into a `DiskFullError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, _full_text(path, error)) from error


def mount_point(path: Path) -> Path:
    """The folder at which the file system of `path` (which need not exist) is mounted."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_mount())


def _full_text(path: Path, error: OSError) -> str:
    folder = path if path.is_dir() else path.parent
    usage, disk = shutil.disk_usage(folder), mount_point(folder)
    cause = "the quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
    return (
        f"{path} could not be written: {cause} (file system mounted at {disk}: {usage.free:,} of {usage.total:,} bytes "
        "free). Everything written before it is whole. Free some space there (old checkpoints are the largest files of a run; train.keep_checkpoints "
        "says how many are kept), or move the run's directory to a larger disk and set runs_dir to match. "
        "Then resume with train.resume=auto."
    )


class AppendFile:
    """A file that grows by whole pieces: a piece that cannot be written in full leaves nothing behind.

    Each `write` goes to the operating system before it returns, so another process sees it at once; with
    ``sync=True`` it also survives a power cut.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        with disk_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0)
            self._descriptor: int | None = os.open(path, flags, 0o666)  # less the umask

    def write(self, data: bytes, *, sync: bool = False) -> None:
        """Append `data`. Raises `DiskFullError`, with the file as it was before."""
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
    """Disk space kept for a small file that must be written even when the disk is full.

    Where the space cannot be had at once, the run fails before it starts. A file system that frees space later than the
    file is removed (some network ones) makes the reserve useless, not wrong.
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
        """Give the space back. Later calls do nothing."""
        self._path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one stroke: a reader, or a crash, sees the old file or the new one."""
    part = _part(path)
    try:
        file = AppendFile(part, fresh=True)
        try:
            file.write(data, sync=True)
        finally:
            file.close()
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def check_target(option: str, path: Path) -> None:
    """Before the work whose result `write_whole` is to write to `path`, which `option` names: ValueError where it cannot."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder. Name a file in it, as in {path / 'page.html'}.")
    if not path.parent.is_dir():
        what = "is a file" if path.parent.exists() else "does not exist"
        raise ValueError(f"{option} {path}: the folder {path.parent} {what}. Make it, or name another place.")
    part = _part(path)
    try:
        AppendFile(part, fresh=True).close()
        part.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path}: nothing can be written to the folder {path.parent} ({error.strerror}). Name another place."
        ) from error


def check_new(option: str, path: Path) -> None:
    """As `check_target`, and ValueError where there is such a file, of which nothing would be kept."""
    check_target(option, path)
    if path.exists():
        raise ValueError(f"{option} {path} is there already, and would be lost. Name another file, or move this one.")


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def drop_torn_line(path: Path) -> bytes:
    """Cut what follows the last newline of `path` (a line that a crash cut short); returns what was cut."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return data[whole:]


def json_line(record: dict[str, Any]) -> bytes:
    """`record` as one line of strict JSON. Floats keep every bit.

    JSON has no NaN and no infinities, and null would not say which of the three it was. They are written as
    the strings "NaN", "Infinity" and "-Infinity" (protobuf's JSON mapping does the same): every JSON parser
    reads the line, and ``float(...)`` in Python or ``Number(...)`` in JavaScript gives the number back.
    numpy's scalars and arrays become numbers and lists; what JSON does not know is written as its ``str``.
    """
    text = json.dumps(strict(record), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def strict(value: Any) -> Any:
    """`value` with nothing in it that strict JSON lacks; see `json_line`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, bad): the JSON objects of `path`, one a line, and how many lines were none. No file: none."""
    records: list[dict[str, Any]] = []
    bad = 0
    if not path.exists():
        return records, bad
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                bad += 1
    return records, bad
