"""A bucket's boxes, out of a rank's parameters and into another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import torch

from megarl.weight_sync.fingerprint import PIECE, Fingerprint, Fingerprints
from megarl.weight_sync.sharded.plan import COPY, Stream
from megarl.weight_sync.sharded.slices import ITEM_BYTES

_BUCKET = COPY.index("bucket")
_CPU = torch.device("cpu")


class Boxes:
    """The boxes of one stream, bucket by bucket. `tensor` gives the memory of a parameter by its number; a box may be
    part of any contiguous one."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.dtype: torch.dtype = getattr(torch, stream.dtype)
        numbers = np.arange(len(stream.buckets) + 1)
        self._starts = np.searchsorted(stream.copies[:, _BUCKET], numbers).tolist()
        self._copies: list[list[int]] = stream.copies[:, _BUCKET + 1 :].tolist()

    def nbytes(self, bucket: int) -> int:
        return int(self.stream.buckets[bucket]) * ITEM_BYTES[self.stream.dtype]

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(self.nbytes(bucket) for bucket in range(len(self.stream.buckets)))

    def pack(
        self, bucket: int, memory: torch.Tensor, tensor: Callable[[int], torch.Tensor], fingerprints: Fingerprints
    ) -> Fingerprint:
        """Into `memory` (uint8, on the host or the parameters' device), converted to what travels. Returns its
        fingerprint."""
        flat = memory.view(self.dtype)
        copies = self._copies[self._starts[bucket] : self._starts[bucket + 1]]
        device = tensor(copies[0][1]).device
        if device == flat.device == _CPU:
            passing = fingerprints.passing(memory)
            for at, part, piece in self._pieces(flat, copies, tensor):
                part.copy_(piece)
                passing.reached(at)
            return passing
        packed = flat if device == flat.device else torch.empty(len(flat), dtype=self.dtype, device=device)
        for at, parameter, offset, stride, rows, columns in copies:
            part = packed[at : at + rows * columns].view(rows, columns)
            part.copy_(box(tensor(parameter), offset, stride, rows, columns))
        if packed is not flat:
            flat.copy_(packed)
        return fingerprints.beside(memory)

    def unpack(
        self,
        bucket: int,
        memory: torch.Tensor,
        tensor: Callable[[int], torch.Tensor],
        fingerprints: Fingerprints,
        known: Fingerprint | None = None,
    ) -> tuple[list[tuple[int, int]], Fingerprint]:
        """Out of `memory` (uint8, on any device), converted to what each parameter has. Returns of each box the
        parameter's number, and how many elements it has; and the fingerprint of `memory`, which may be `known`."""
        flat = memory.view(self.dtype)
        copies = self._copies[self._starts[bucket] : self._starts[bucket + 1]]
        written = [(parameter, rows * columns) for _, parameter, _, _, rows, columns in copies]
        if tensor(copies[0][1]).device == flat.device == _CPU:
            found = known or fingerprints.passing(memory)
            for at, part, piece in self._pieces(flat, copies, tensor):
                if not isinstance(found, Future):
                    found.reached(at)
                piece.copy_(part)
            return written, found
        if known is None and fingerprints.on_device:
            flat = flat.to(tensor(copies[0][1]).device)
            memory = flat.view(torch.uint8)
        found = known or fingerprints.beside(memory)
        for at, parameter, offset, stride, rows, columns in copies:
            target = tensor(parameter)
            if flat.device != target.device:
                flat = flat.to(target.device)
            part = flat[at : at + rows * columns].view(rows, columns)
            box(target, offset, stride, rows, columns).copy_(part)
        return written, found

    @staticmethod
    def _pieces(
        flat: torch.Tensor, copies: list[list[int]], tensor: Callable[[int], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of boxes between `flat` and parameters: where a piece ends in the bucket, in bytes, and the piece on both sides;
        in order, without gaps, and none much larger than a processor's cache is."""
        for at, parameter, offset, stride, rows, columns in copies:
            part = flat[at : at + rows * columns].view(rows, columns)
            whole = box(tensor(parameter), offset, stride, rows, columns)
            fits = PIECE // flat.itemsize
            some = max(1, fits // columns)
            for row in range(0, rows, some):
                for column in range(0, columns, fits):  # more than once where a row alone is longer
                    end = at + (min(row + some, rows) - 1) * columns + min(column + fits, columns)
                    cut = slice(row, row + some), slice(column, column + fits)
                    yield end * flat.itemsize, part[cut], whole[cut]

    def names(self, bucket: int, tensors: tuple[str, ...]) -> list[str]:
        """The checkpoint's tensors of which boxes are in `bucket`. `tensors`: of this rank's description."""
        numbers = self.stream.tensors[self._starts[bucket] : self._starts[bucket + 1]]
        return [tensors[number] for number in dict.fromkeys(numbers.tolist())]


def box(tensor: torch.Tensor, offset: int, stride: int, rows: int, columns: int) -> torch.Tensor:
    """Elements `offset + i * stride + j` of a tensor's memory, as a matrix."""
    return tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + offset)
