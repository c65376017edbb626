"""Copy slices between a rank's parameters and the buckets of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import torch

from megarl.weight_sync.fingerprint import CHUNK_BYTES, Fingerprint, Fingerprinter
from megarl.weight_sync.session import abbreviate_names
from megarl.weight_sync.sharded.plan import COPY_COLUMNS, Stream
from megarl.weight_sync.sharded.slices import ITEM_BYTES

_BUCKET = COPY_COLUMNS.index("bucket")
_CPU = torch.device("cpu")


class StreamCopier:
    """Packs and unpacks the buckets of one stream. `tensor` arguments map a parameter's number to its contiguous memory."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.dtype: torch.dtype = getattr(torch, stream.dtype)
        numbers = np.arange(len(stream.bucket_elements) + 1)
        self._starts = np.searchsorted(stream.copies[:, _BUCKET], numbers).tolist()
        self._copies: list[list[int]] = stream.copies[:, _BUCKET + 1 :].tolist()

    def nbytes(self, bucket: int) -> int:
        return int(self.stream.bucket_elements[bucket]) * ITEM_BYTES[self.stream.dtype]

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(self.nbytes(bucket) for bucket in range(len(self.stream.bucket_elements)))

    def pack(
        self, bucket: int, memory: torch.Tensor, tensor: Callable[[int], torch.Tensor], fingerprinter: Fingerprinter
    ) -> Fingerprint:
        """Copy slices into `memory` (uint8, on the host or the parameters' device), in the stream's dtype."""
        flat = memory.view(self.dtype)
        copies = self._copies[self._starts[bucket] : self._starts[bucket + 1]]
        device = tensor(copies[0][1]).device
        if device == flat.device == _CPU:
            fingerprint = fingerprinter.streaming(memory)
            for end, packed_part, parameter_part in self._chunks(flat, copies, tensor):
                packed_part.copy_(parameter_part)
                fingerprint.advance(end)
            return fingerprint
        packed = flat if device == flat.device else torch.empty(len(flat), dtype=self.dtype, device=device)
        for at, parameter, offset, stride, rows, columns in copies:
            part = packed[at : at + rows * columns].view(rows, columns)
            part.copy_(slice_view(tensor(parameter), offset, stride, rows, columns))
        if packed is not flat:
            flat.copy_(packed)
        return fingerprinter.start(memory)

    def unpack(
        self,
        bucket: int,
        memory: torch.Tensor,
        tensor: Callable[[int], torch.Tensor],
        fingerprinter: Fingerprinter,
        fingerprint: Fingerprint | None = None,
    ) -> tuple[list[tuple[int, int]], Fingerprint]:
        """Copy slices from `memory` (uint8, any device) into parameters, in the parameters' dtypes.

        Returns (parameter's number, elements) of each slice, and the fingerprint of `memory`. Pass `fingerprint` if it is
        already computed.
        """
        flat = memory.view(self.dtype)
        copies = self._copies[self._starts[bucket] : self._starts[bucket + 1]]
        written = [(parameter, rows * columns) for _, parameter, _, _, rows, columns in copies]
        if tensor(copies[0][1]).device == flat.device == _CPU:
            fingerprint = fingerprint or fingerprinter.streaming(memory)
            for end, packed_part, parameter_part in self._chunks(flat, copies, tensor):
                if not isinstance(fingerprint, Future):
                    fingerprint.advance(end)
                parameter_part.copy_(packed_part)
            return written, fingerprint
        if fingerprint is None and fingerprinter.on_device:
            flat = flat.to(tensor(copies[0][1]).device)
            memory = flat.view(torch.uint8)
        fingerprint = fingerprint or fingerprinter.start(memory)
        for at, parameter, offset, stride, rows, columns in copies:
            target = tensor(parameter)
            if flat.device != target.device:
                flat = flat.to(target.device)
            part = flat[at : at + rows * columns].view(rows, columns)
            slice_view(target, offset, stride, rows, columns).copy_(part)
        return written, fingerprint

    @staticmethod
    def _chunks(
        flat: torch.Tensor, copies: list[list[int]], tensor: Callable[[int], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Cut copies into chunks of about `CHUNK_BYTES`, in order and without gaps.

        Yields the chunk's end in the bucket, in bytes, and its views of the bucket and of the parameter.
        """
        for at, parameter, offset, stride, rows, columns in copies:
            packed = flat[at : at + rows * columns].view(rows, columns)
            region = slice_view(tensor(parameter), offset, stride, rows, columns)
            max_columns = CHUNK_BYTES // flat.itemsize
            max_rows = max(1, max_columns // columns)
            for row in range(0, rows, max_rows):
                for column in range(0, columns, max_columns):  # more than one if a row is longer than a chunk
                    end = at + (min(row + max_rows, rows) - 1) * columns + min(column + max_columns, columns)
                    cut = slice(row, row + max_rows), slice(column, column + max_columns)
                    yield end * flat.itemsize, packed[cut], region[cut]

    def describe(self, bucket: int, tensors: tuple[str, ...]) -> str:
        """Return a bucket's description for messages. `tensors`: of this rank's slice table."""
        names = abbreviate_names(self.names(bucket, tensors))
        return f"bucket {bucket} of stream {self.stream.number} from trainer {self.stream.source} ({names})"

    def names(self, bucket: int, tensors: tuple[str, ...]) -> list[str]:
        """Return the checkpoint tensors with slices in `bucket`. `tensors`: of this rank's slice table."""
        numbers = self.stream.tensors[self._starts[bucket] : self._starts[bucket + 1]]
        return [tensors[number] for number in dict.fromkeys(numbers.tolist())]


def slice_view(tensor: torch.Tensor, offset: int, stride: int, rows: int, columns: int) -> torch.Tensor:
    """Return elements `offset + i * stride + j` of a tensor's memory, as a matrix [rows, columns]."""
    return tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + offset)
