"""What a folder holds, to the last byte: a list of its files with their sizes and checksums.

CRC-32 finds what disks and copies do to files (a cut end, flipped bits, a wrong block); it is no protection
against intent. It is computed while a file is written, so it costs no second reading then.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.atomic_files import write_durably

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_READERS = 8  # files read at a time: zlib and the file system both work beside Python

FileSum = tuple[int, int]
"""Bytes and CRC-32 of a file."""


def file_sum(path: Path) -> FileSum:
    """Read `path` to its end. Raises OSError."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def write_manifest(folder: Path, known: dict[str, FileSum]) -> None:
    """Write `folder`'s manifest, last of all its files. `known`: sums by path within the folder; others are read."""
    sums = {name: list(known.get(name) or file_sum(folder / name)) for name in _files(folder)}
    missing = sorted(set(known) - set(sums))
    assert not missing, f"written, but not there: {missing}"
    write_durably(folder / MANIFEST, json.dumps({"files": sums}, indent=0).encode())


def find_damage(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with `folder`, naming the file; None where it is whole.

    Without `checksums` only presence and sizes are compared, which reads no file but the manifest.
    """
    try:
        sums = json.loads((folder / MANIFEST).read_bytes())["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing, which is written last: it is incomplete"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    for name, (size, _) in sums.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    if not checksums:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(_damage_of_file, [folder / name for name in sums], [crc for _, crc in sums.values()])
        wrong = next(((name, reason) for name, reason in zip(sums, found, strict=True) if reason), None)
    return f"{wrong[0]} {wrong[1]}" if wrong else None


def _damage_of_file(path: Path, crc: int) -> str | None:
    try:
        return None if file_sum(path)[1] == crc else "is not what was written: its checksum differs"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> list[str]:
    """Paths within `folder`, with forward slashes, sorted."""
    return sorted(
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
        if name != MANIFEST
    )
