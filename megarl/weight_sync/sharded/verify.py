"""Compare loaded weights with the trainers' export, slice by slice, for each engine rank.

Bucket fingerprints prove that the packed bytes arrived. They do not prove that the right slices were packed and written to
the right places. That is checked by comparing the engine's parameters with tensors that a different code path exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megarl.weight_sync.fingerprint import fingerprint
from megarl.weight_sync.sharded.copy import slice_view
from megarl.weight_sync.sharded.slices import SliceTable, as_matrix


class SliceFingerprints:
    """Fingerprints of an engine rank's slices, read from its parameters."""

    def __init__(self, needed: SliceTable) -> None:
        self._slices: dict[int, list[tuple[int, list[int]]]] = {}
        for number, row in enumerate(needed.slices.tolist()):
            self._slices.setdefault(row[5], []).append((number, row))
        self.fingerprints: list[str] = [""] * len(needed.slices)

    def add(self, parameters: Iterable[int], tensor: Callable[[int], torch.Tensor]) -> None:
        """Take the fingerprints of parameters that are complete and not yet post-processed."""
        for parameter in parameters:
            for number, (_, _, _, rows, columns, _, offset, stride) in self._slices.get(parameter, []):
                self.fingerprints[number] = _fingerprint(slice_view(tensor(parameter), offset, stride, rows, columns))


def expected_fingerprints(export: Iterable[tuple[str, torch.Tensor]], needed: Sequence[SliceTable]) -> list[list[str]]:
    """Compute `SliceFingerprints.fingerprints` from an export, for ranks with the slice tables `needed`. Drains `export`."""
    by_tensor: dict[str, list[tuple[int, int, list[int]]]] = {}
    for rank, table in enumerate(needed):
        for number, row in enumerate(table.slices.tolist()):
            by_tensor.setdefault(table.tensors[row[0]], []).append((rank, number, row))
    fingerprints = [[""] * len(table.slices) for table in needed]
    for name, tensor in export:
        matrix = tensor.reshape(as_matrix(tensor.shape))
        for rank, number, (_, row, column, rows, columns, parameter, _, _) in by_tensor.get(name, []):
            dtype = getattr(torch, needed[rank].dtypes[parameter])
            region = matrix[row : row + rows, column : column + columns]
            fingerprints[rank][number] = _fingerprint(region.to(dtype))
    return fingerprints


def differing_tensors(table: SliceTable, loaded: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Return the names of tensors that have a slice with differing fingerprints."""
    numbers = [number for number, pair in enumerate(zip(loaded, expected, strict=True)) if pair[0] != pair[1]]
    return list(dict.fromkeys(table.tensors[table.slices[number, 0]] for number in numbers))


def _fingerprint(matrix: torch.Tensor) -> str:
    return fingerprint(matrix.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy())
