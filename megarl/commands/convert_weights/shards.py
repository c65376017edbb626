"""Convert the files of a quantized checkpoint to bfloat16, one safetensors file at a time, in bounded memory."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.atomic_files import sync
from megarl.commands.convert_weights.layout import Layout, TensorEntry, lay_out, read_layout

KEPT = ("F64", "F32", "BF16", "F16")  # dtypes that are copied unchanged
CHUNK = 8 << 20  # elements converted at a time
_SAMPLES, _SAMPLE = 64, 4096  # samples of a file's data in its fingerprint, and bytes of each
# dtype -> (numpy type, exponent bits; all set in NaN and infinity)
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `begin`: its first byte in the file."""

    path: Path
    entry: TensorEntry
    begin: int

    def read(self, first: int, size: int) -> bytearray:
        """Return `size` bytes from byte `first` of the tensor."""
        with self.path.open("rb") as file:
            return read_whole(file, self.begin + first, size)


class Format(ABC):
    """A checkpoint's format of quantized tensors: each has values and scales, under names that end in `values` and `scales`."""

    values: str  # "" if the values have the tensor's own name
    scales: str
    name: str  # for messages: "FP8"

    @abstractmethod
    def is_quantized(self, entry: TensorEntry) -> bool:
        """Return whether a tensor holds quantized values."""

    @abstractmethod
    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        """Return the shape of quantized values after conversion."""

    @abstractmethod
    def check_pair(self, where: str, values: TensorEntry, scales: TensorEntry) -> None:
        """Check the shapes and the dtype of scales. Raises ValueError, which begins with `where`."""

    @abstractmethod
    def convert(self, values: StoredTensor, scales: StoredTensor) -> Iterator[memoryview]:
        """Yield the bfloat16 bytes of a quantized tensor, in order and in bounded memory."""

    @abstractmethod
    def __str__(self) -> str:
        """Return a description: "FP8 in blocks of 128 x 128"."""

    def target(self, entry: TensorEntry) -> str:
        """Return the name of quantized values after conversion."""
        return entry.name.removesuffix(self.values)

    def scales_of(self, entry: TensorEntry) -> str:
        """Return the name of the scales of quantized values."""
        return self.target(entry) + self.scales


@dataclass(frozen=True)
class ShardJob:
    """One file to convert. `scales`: name of quantized values -> file with their scales."""

    source: Path
    target: Path
    format: Format
    scales: Mapping[str, Path]


@dataclass(frozen=True)
class ShardResult:
    """A converted file. `size`: bytes of the file."""

    name: str
    size: int


def converted_layout(source: Layout, format: Format) -> tuple[bytes, Layout]:
    """Return (header, layout) of the bfloat16 file for `source`: all tensors without scales."""
    kept = _kept(source, format)
    return lay_out(
        (name, "BF16", format.shape(entry)) if format.is_quantized(entry) else (name, entry.dtype, entry.shape)
        for name, entry in kept.items()
    )


def _kept(source: Layout, format: Format) -> dict[str, TensorEntry]:
    """Return the tensors of a file that are not scales, by their names after conversion, in the file's order."""
    ordered = sorted(source.entries.values(), key=lambda entry: entry.begin)
    kept = [entry for entry in ordered if not entry.name.endswith(format.scales)]
    return {format.target(entry) if format.is_quantized(entry) else entry.name: entry for entry in kept}


def check_source(name: str, layout: Layout, format: Format, entries: Mapping[str, TensorEntry]) -> None:
    """Check that all tensors of a file belong to `format`. `entries`: the tensors of all files, by name.

    Raises ValueError with the file and the tensor.
    """
    for entry in layout.entries.values():
        where = f"{name}: {entry.name}"
        if entry.name.endswith(format.scales):
            values = entries.get(tensor := entry.name.removesuffix(format.scales) + format.values)
            if values is None:
                raise ValueError(f"{where} has scales, and no file has their tensor, {tensor}")
            if not format.is_quantized(values):
                raise ValueError(f"{where} has scales for a tensor in {values.dtype}, which needs none")
        elif format.is_quantized(entry):
            scales = entries.get(format.scales_of(entry))
            if scales is None:
                raise ValueError(f"{where} is in {format.name}, and no file has its scales, {format.scales_of(entry)}")
            format.check_pair(where, entry, scales)
        elif entry.dtype not in KEPT:
            raise ValueError(f"{where} is in {entry.dtype}; supported: {format.name}, {', '.join(KEPT)}")


def convert_shard(job: ShardJob) -> ShardResult:
    """Write `.NAME.partial`, read it back, and rename it to `job.target`, which is therefore always complete.

    Raises ValueError if a value is not finite, RuntimeError if the disk returns other bytes than were written, and
    OSError if writing fails.
    """
    source = read_layout(job.source)
    header, target = converted_layout(source, job.format)
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
    layouts, kept = {job.source: source}, _kept(source, job.format)
    for name in target.entries:
        entry = kept[name]
        if not job.format.is_quantized(entry) or not entry.size:
            yield from _read(data, source.data + entry.begin, entry.size)
            continue
        path = job.scales[entry.name]
        if path not in layouts:
            layouts[path] = read_layout(path)
        scales = layouts[path].entries[job.format.scales_of(entry)]
        yield from job.format.convert(
            StoredTensor(job.source, entry, source.data + entry.begin),
            StoredTensor(path, scales, layouts[path].data + scales.begin),
        )


def _check_written(path: Path, name: str, expected: Layout, crc: int) -> None:
    if read_layout(path) != expected:
        raise RuntimeError(f"{path}: the header read back differs from the header written: the disk is at fault")
    with path.open("rb") as file:
        read = zlib.crc32(read_whole(file, 0, expected.data))
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
        yield read_whole(file, offset, min(step, begin + size - offset))


def read_whole(file: io.BufferedReader, begin: int, size: int) -> bytearray:
    """Return the bytes [begin, begin + size). Raises ValueError if the file ends before."""
    buffer = bytearray(size)
    file.seek(begin)
    if file.readinto(buffer) < size:
        raise ValueError(f"{file.name} is cut short")
    return buffer
