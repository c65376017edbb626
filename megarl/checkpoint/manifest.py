"""Manifest of a folder: a list of its files with sizes and CRC-32 checksums.

CRC-32 detects damage by disks and copies (truncation, flipped bits, a wrong block), not deliberate changes. It is
computed while a file is written, which avoids a second read.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.atomic_files import write_synced

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_READERS = 8  # files read in parallel: zlib and file reads release the GIL

FileSum = tuple[int, int]
"""Bytes and CRC-32 of a file."""


def file_sum(path: Path) -> FileSum:
    """Read `path` and return its size and checksum. Raises OSError."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def write_manifest(folder: Path, computed: dict[str, FileSum]) -> None:
    """Write `folder`'s manifest, as its last file. `computed`: known sums by relative path; other files are read."""
    sums = {name: list(computed.get(name) or file_sum(folder / name)) for name in _files(folder)}
    missing = sorted(set(computed) - set(sums))
    assert not missing, f"files were written but are missing: {missing}"
    write_synced(folder / MANIFEST, json.dumps({"files": sums}, indent=0).encode())


def find_damage(folder: Path, *, checksums: bool = True) -> str | None:
    """Describe the first damage in `folder`, with the file's name; None if it is intact.

    Without `checksums`, only the presence and size of files are compared, which reads only the manifest.
    """
    try:
        sums = json.loads((folder / MANIFEST).read_bytes())["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing; it is written last, so the folder is incomplete"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    for name, (size, _) in sums.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if actual != size:
            return f"{name} has {actual} bytes instead of {size}"
    if not checksums:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        damages = pool.map(_damage_of_file, [folder / name for name in sums], [crc for _, crc in sums.values()])
        return next((f"{name} {damage}" for name, damage in zip(sums, damages, strict=True) if damage), None)


def _damage_of_file(path: Path, crc: int) -> str | None:
    try:
        return None if file_sum(path)[1] == crc else "has changed since it was written: its checksum differs"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> list[str]:
    """Paths within `folder`, with forward slashes, sorted."""
    return sorted(
        os.path.relpath(os.path.join(directory, name), folder)
        for directory, _, names in os.walk(folder)
        for name in names
        if name != MANIFEST
    )
