"""Convert FP8 weights with block scales to bfloat16, one safetensors file at a time, in bounded memory.

Format: README_WEIGHTS.md of deepseek-ai/DeepSeek-V3. A matrix NAME is stored in float8_e4m3fn, and `NAME_scale_inv` has a
factor for each block of rows and columns. Blocks at the edges are smaller. The value of an element is element * factor in
float32, rounded to bfloat16 (nearest, ties to even).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.atomic_files import sync
from megarl.commands.convert_weights.layout import Layout, TensorEntry, lay_out, read_layout

if TYPE_CHECKING:
    import torch

FP8 = "F8_E4M3"
SCALE = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16")
KEPT = ("F64", "F32", "BF16", "F16")  # dtypes that are copied unchanged
CHUNK = 8 << 20  # elements converted at a time
_SAMPLES, _SAMPLE = 64, 4096  # samples of a file's data in its fingerprint, and bytes of each
# dtype -> (numpy type, exponent bits; all set in NaN and infinity)
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


@dataclass(frozen=True)
class ShardJob:
    """One file to convert. `scales`: name of a quantized tensor -> file with its scales."""

    source: Path
    target: Path
    block: tuple[int, int]
    scales: Mapping[str, Path]


@dataclass(frozen=True)
class ShardResult:
    """A converted file. `size`: bytes of the file."""

    name: str
    size: int


def converted_layout(source: Layout) -> tuple[bytes, Layout]:
    """Return (header, layout) of the bfloat16 file for `source`: all tensors under the same names, without scales."""
    ordered = sorted(source.entries.values(), key=lambda entry: entry.begin)
    kept = [entry for entry in ordered if not entry.name.endswith(SCALE)]
    return lay_out((entry.name, "BF16" if entry.dtype == FP8 else entry.dtype, entry.shape) for entry in kept)


def check_source(name: str, layout: Layout, block: tuple[int, int], entries: Mapping[str, TensorEntry]) -> None:
    """Check that all tensors of a file belong to this format. `entries`: the tensors of all files, by name.

    Raises ValueError with the file and the tensor.
    """
    for entry in layout.entries.values():
        where = f"{name}: {entry.name}"
        if entry.name.endswith(SCALE):
            weight = entries.get(entry.name.removesuffix(SCALE))
            if entry.dtype not in SCALE_DTYPES:
                raise ValueError(f"{where} has scales in {entry.dtype}; supported: {' and '.join(SCALE_DTYPES)}")
            if weight is None:
                raise ValueError(f"{where} has scales, and no file has their tensor, {entry.name.removesuffix(SCALE)}")
            if weight.dtype != FP8:
                raise ValueError(f"{where} has scales for a tensor in {weight.dtype}, which needs none")
        elif entry.dtype == FP8:
            scale = entries.get(entry.name + SCALE)
            if scale is None:
                raise ValueError(f"{where} is in float8, and no file has its scales, {entry.name}{SCALE}")
            expected = tuple(-(-size // side) for size, side in zip(entry.shape, block, strict=False))
            if len(entry.shape) != 2 or scale.shape != expected:
                shapes = f"{list(entry.shape)}, its scales {list(scale.shape)}"
                raise ValueError(f"{where} is {shapes}; blocks of {block[0]} x {block[1]} need scales {list(expected)}")
        elif entry.dtype not in KEPT:
            raise ValueError(f"{where} is in {entry.dtype}; supported: FP8 e4m3, {', '.join(KEPT)}")


def convert_shard(job: ShardJob) -> ShardResult:
    """Write `.NAME.partial`, read it back, and rename it to `job.target`, which is therefore always complete.

    Raises ValueError if a value is not finite, RuntimeError if the disk returns other bytes than were written, and
    OSError if writing fails.
    """
    source = read_layout(job.source)
    header, target = converted_layout(source)
    partial = partial_path(job.target)
    crc = 0
    with job.source.open("rb") as data, partial.open("wb") as out:
        for piece in itertools.chain([header], _converted(job, source, target, data)):
            out.write(piece)
            crc = zlib.crc32(piece, crc)
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drop the page cache: the check reads the disk
    _check_written(partial, job.target.name, target, crc)
    partial.rename(job.target)
    sync(job.target.parent)
    return ShardResult(job.target.name, target.size)


def partial_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def fingerprint(path: Path) -> str:
    """Return a digest of the file's size, its header and 64 samples of its data. It does not depend on times."""
    layout = read_layout(path)
    digest = hashlib.sha256(str(layout.size).encode())
    with path.open("rb") as file:
        digest.update(file.read(layout.data))
        room = max(layout.size - layout.data - _SAMPLE, 0)
        for number in range(_SAMPLES):
            file.seek(layout.data + room * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _converted(
    job: ShardJob, source: Layout, target: Layout, data: io.BufferedReader
) -> Iterator[bytearray | memoryview]:
    """Yield the bytes of each tensor of `target`, in order."""
    layouts = {job.source: source}
    for name in target.entries:
        entry = source.entries[name]
        if entry.dtype != FP8 or not entry.size:
            yield from _read(data, source.data + entry.begin, entry.size)
            continue
        path = job.scales[name]
        if path not in layouts:
            layouts[path] = read_layout(path)
        scales = _read_scales(path, layouts[path], name + SCALE)
        rows, columns = entry.shape
        step = max(CHUNK // max(columns, 1) // job.block[0], 1) * job.block[0]  # rows at a time, a multiple of blocks
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = _read_whole(data, source.data + entry.begin + first * columns, count * columns)
            block_rows = slice(first // job.block[0], -(-(first + count) // job.block[0]))
            yield _to_bfloat16(raw, (count, columns), scales[block_rows], job.block)


def _to_bfloat16(raw: bytearray, shape: tuple[int, int], scales: torch.Tensor, block: tuple[int, int]) -> memoryview:
    """Convert float8_e4m3fn bytes to bfloat16 bytes. `shape`: rows and columns; the first row begins a block."""
    import torch

    values = torch.frombuffer(raw, dtype=torch.float8_e4m3fn).to(torch.float32).view(shape)
    factors = scales.repeat_interleave(block[1], dim=1)[:, : shape[1]]
    for number, row in enumerate(factors):
        values[number * block[0] : (number + 1) * block[0]] *= row
    return values.to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1).data


def _read_scales(path: Path, layout: Layout, name: str) -> torch.Tensor:
    """Read the scales `name` of a file, as float32."""
    import torch

    entry = layout.entries[name]
    with path.open("rb") as file:
        raw = _read_whole(file, layout.data + entry.begin, entry.size)
    dtype = torch.bfloat16 if entry.dtype == "BF16" else torch.float32
    return torch.frombuffer(raw, dtype=dtype).float().reshape(entry.shape)


def _check_written(path: Path, name: str, expected: Layout, crc: int) -> None:
    if read_layout(path) != expected:
        raise RuntimeError(f"{path}: the header read back differs from the header written: the disk is at fault")
    with path.open("rb") as file:
        read = zlib.crc32(_read_whole(file, 0, expected.data))
        for entry in expected.entries.values():
            for piece in _read(file, expected.data + entry.begin, entry.size):
                read = zlib.crc32(piece, read)
                width, exponent = _EXPONENTS[entry.dtype]
                bits = np.frombuffer(piece, dtype=width)
                if ((bits & np.array(exponent, dtype=width)) == exponent).any():
                    raise ValueError(f"{name}: {entry.name} has a value that is not finite (NaN or infinity)")
    if read != crc:
        raise RuntimeError(f"{path}: the bytes read back differ from the bytes written: the disk is at fault")


def _read(file: io.BufferedReader, begin: int, size: int) -> Iterator[bytearray]:
    """Yield the bytes [begin, begin + size) in pieces that do not split elements."""
    step = CHUNK * 2
    for offset in range(begin, begin + size, step):
        yield _read_whole(file, offset, min(step, begin + size - offset))


def _read_whole(file: io.BufferedReader, begin: int, size: int) -> bytearray:
    buffer = bytearray(size)
    file.seek(begin)
    if file.readinto(buffer) < size:
        raise ValueError(f"{file.name} is cut short")
    return buffer
