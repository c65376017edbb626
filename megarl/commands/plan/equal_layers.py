"""Slices that an engine rank needs of equal layers, derived from the first and the last of them. Pure.

vLLM's loader takes long over tens of thousands of tensors, and most layers differ only by their number. So only two layers of
each kind are loaded; if they need equal slices, so do the layers between them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder

Tensor = tuple[str, tuple[int, ...], str]  # as of `slices.held_tensors`
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..+)")


@dataclass(frozen=True)
class SampledLayers:
    """The checkpoint's tensors, `every`, and equal layers: `stands_for` maps each inner layer (prefix, number) to the numbers
    of the first and the last equal layer."""

    every: Sequence[Tensor]
    stands_for: dict[tuple[str, str], tuple[str, str]]

    @classmethod
    def of(cls, every: Sequence[Tensor]) -> SampledLayers:
        layers: dict[tuple[str, str], list[tuple[object, ...]]] = defaultdict(list)
        for name, shape, dtype in every:
            if match := _LAYER.fullmatch(name):
                layers[match[1], match[2]].append((match[3], tuple(shape), dtype))
        kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for (before, number), tensors in layers.items():
            kinds[(before, *tensors)].append(number)
        between = {
            (str(before), number): (numbers[0], numbers[-1])
            for (before, *_), numbers in kinds.items()
            for number in numbers[1:-1]
        }
        return cls(every, between)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the layers that are loaded."""
        return [tensor for tensor in self.every if self._representative(tensor[0])[1] is None]

    def expand(self, sampled: SliceTable) -> SliceTable | None:
        """Extend the slices needed of `self.tensors` to all tensors.

        None if the first and the last equal layer differ, or if the loader does more than copy.
        """
        if sampled.whole:
            return None
        slices = _by_tensor(sampled)
        ends = {(before, *pair) for (before, _), pair in self.stands_for.items()}
        if not all(_are_equal(slices, f"{before}{first}.", f"{before}{last}.", last) for before, first, last in ends):
            return None
        builder = SliceTableBuilder()
        for name, shape, _ in self.every:
            like, layer = self._representative(name)
            for parameter, dtype, box, offset, stride in _numbered(slices.get(like, []), layer):
                place = builder.tensor(name, shape)
                builder.add(place, box, builder.parameter(parameter, dtype), offset, stride)
        return builder.build()

    def _representative(self, name: str) -> tuple[str, str | None]:
        """Return the loaded tensor that represents `name`, and the layer number of `name`, or None if it was loaded."""
        match = _LAYER.fullmatch(name)
        if match is None or (match[1], match[2]) not in self.stands_for:
            return name, None
        return f"{match[1]}{self.stands_for[match[1], match[2]][0]}{match[3]}", match[2]


Slice = tuple[str, str, tuple[int, int, int, int], int, int]  # parameter and type, box, offset, stride


def _by_tensor(table: SliceTable) -> dict[str, list[Slice]]:
    by_tensor: dict[str, list[Slice]] = defaultdict(list)
    for tensor, row, column, rows, columns, parameter, offset, stride in table.slices.tolist():
        box = (row, column, rows, columns)
        by_tensor[table.tensors[tensor]].append(
            (table.parameters[parameter], table.dtypes[parameter], box, offset, stride)
        )
    return by_tensor


def _are_equal(slices: dict[str, list[Slice]], first: str, last: str, layer: str) -> bool:
    """Return True if two layers need equal slices. `first`, `last`: prefixes of their tensors; `layer`: the last's number."""
    renumbered = {
        name.removeprefix(first): _numbered(entries, layer)
        for name, entries in slices.items()
        if name.startswith(first)
    }
    return renumbered == {name.removeprefix(last): entries for name, entries in slices.items() if name.startswith(last)}


def _numbered(slices: Sequence[Slice], layer: str | None) -> Sequence[Slice]:
    """Return the same slices with parameters of another layer."""
    if layer is None:
        return slices
    return [(_LAYER.sub(rf"\g<1>{layer}\g<3>", box[0]), *box[1:]) for box in slices]
