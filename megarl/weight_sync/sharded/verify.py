"""What engines took in, held to the trainers' own export: the boxes that each engine rank needs, one by one.

Fingerprints of buckets prove that what was packed arrived. That the right things were packed, and put where they belong,
is proven by comparing the engine's parameters, as the checkpoint has them, with tensors that came another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megarl.weight_sync.fingerprint import fingerprint
from megarl.weight_sync.sharded.copy import box
from megarl.weight_sync.sharded.slices import SliceTable, as_matrix


class SliceFingerprints:
    """Fingerprints of an engine rank's boxes, as they lie in its parameters."""

    def __init__(self, need: SliceTable) -> None:
        self._boxes: dict[int, list[tuple[int, list[int]]]] = {}
        for number, one in enumerate(need.slices.tolist()):
            self._boxes.setdefault(one[5], []).append((number, one))
        self.fingerprints: list[str] = [""] * len(need.slices)

    def examine(self, parameters: Iterable[int], tensor: Callable[[int], torch.Tensor]) -> None:
        """Of these parameters, which are complete and which nothing has been made of yet."""
        for parameter in parameters:
            for number, (_, _, _, rows, columns, _, offset, stride) in self._boxes.get(parameter, []):
                self.fingerprints[number] = _of(box(tensor(parameter), offset, stride, rows, columns))


def expected(export: Iterable[tuple[str, torch.Tensor]], needs: Sequence[SliceTable]) -> list[list[str]]:
    """What `SliceFingerprints.fingerprints` of ranks with these `needs` must be. Takes all of `export`."""
    wanted: dict[str, list[tuple[int, int, list[int]]]] = {}
    for rank, need in enumerate(needs):
        for number, one in enumerate(need.slices.tolist()):
            wanted.setdefault(need.tensors[one[0]], []).append((rank, number, one))
    found = [[""] * len(need.slices) for need in needs]
    for name, tensor in export:
        matrix = tensor.reshape(as_matrix(tensor.shape))
        for rank, number, (_, row, column, rows, columns, parameter, _, _) in wanted.get(name, []):
            dtype = getattr(torch, needs[rank].dtypes[parameter])
            found[rank][number] = _of(matrix[row : row + rows, column : column + columns].to(dtype))
    return found


def differing(need: SliceTable, found: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Tensors of which boxes differ."""
    numbers = [number for number, (own, other) in enumerate(zip(found, wanted, strict=True)) if own != other]
    return list(dict.fromkeys(need.tensors[need.slices[number, 0]] for number in numbers))


def _of(matrix: torch.Tensor) -> str:
    return fingerprint(matrix.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy())
