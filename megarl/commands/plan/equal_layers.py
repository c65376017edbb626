"""What an engine's rank needs of layers that are alike, told from the first and the last of them. Pure.

vLLM's loader goes through tens of thousands of tensors, of layers that differ by their numbers alone. So it is given two
layers of each kind; where it does the same with both, it does so with those between them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder

Tensor = tuple[str, tuple[int, ...], str]  # as of `boxes.held_tensors`
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..+)")


@dataclass(frozen=True)
class Sampled:
    """`every`: of the checkpoint. `stands_for`: layers (what comes before the number, and it) -> the first layer like it,
    and the last, of those that are between two."""

    every: Sequence[Tensor]
    stands_for: dict[tuple[str, str], tuple[str, str]]

    @classmethod
    def of(cls, every: Sequence[Tensor]) -> Sampled:
        layers: dict[tuple[str, str], list[tuple[object, ...]]] = defaultdict(list)
        for name, shape, dtype in every:
            if found := _LAYER.fullmatch(name):
                layers[found[1], found[2]].append((found[3], tuple(shape), dtype))
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
        """Those to ask about."""
        return [one for one in self.every if self._known(one[0])[1] is None]

    def whole(self, told: SliceTable) -> SliceTable | None:
        """What is needed of all tensors, by what `told` says of `self.tensors`. None: layers that look alike are not, or the
        loader does something else than copy, which is not carried over."""
        if told.whole:
            return None
        boxes = _by_tensor(told)
        ends = {(before, *pair) for (before, _), pair in self.stands_for.items()}
        if not all(_alike(boxes, f"{before}{first}.", f"{before}{last}.", last) for before, first, last in ends):
            return None
        describer = SliceTableBuilder()
        for name, shape, _ in self.every:
            like, layer = self._known(name)
            for parameter, dtype, box, offset, stride in _numbered(boxes.get(like, []), layer):
                place = describer.tensor(name, shape)
                describer.add(place, box, describer.parameter(parameter, dtype), offset, stride)
        return describer.build()

    def _known(self, name: str) -> tuple[str, str | None]:
        """The tensor that tells of `name`, and the number of the latter's layer, where it is another one."""
        found = _LAYER.fullmatch(name)
        if found is None or (found[1], found[2]) not in self.stands_for:
            return name, None
        return f"{found[1]}{self.stands_for[found[1], found[2]][0]}{found[3]}", found[2]


Box = tuple[str, str, tuple[int, int, int, int], int, int]  # parameter and type, box, offset, stride


def _by_tensor(told: SliceTable) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = defaultdict(list)
    for tensor, row, column, rows, columns, parameter, offset, stride in told.slices.tolist():
        box = (row, column, rows, columns)
        found[told.tensors[tensor]].append((told.parameters[parameter], told.dtypes[parameter], box, offset, stride))
    return found


def _alike(boxes: dict[str, list[Box]], first: str, last: str, layer: str) -> bool:
    """Whether two layers, of which the second has number `layer`, need the same. `first` and `last`: how their tensors begin."""
    ones = {
        name.removeprefix(first): _numbered(found, layer) for name, found in boxes.items() if name.startswith(first)
    }
    return ones == {name.removeprefix(last): found for name, found in boxes.items() if name.startswith(last)}


def _numbered(boxes: Sequence[Box], layer: str | None) -> Sequence[Box]:
    """The same of another layer."""
    if layer is None:
        return boxes
    return [(_LAYER.sub(rf"\g<1>{layer}\g<3>", box[0]), *box[1:]) for box in boxes]
