"""Equal layers are described once; the expanded description equals one of all layers."""

from __future__ import annotations

from megarl.commands.plan.equal_layers import SampledLayers, Tensor
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder

LAYERS = 12
TENSORS: list[Tensor] = [("model.embed.weight", (8, 4), "bfloat16")]
TENSORS += [
    (f"model.layers.{layer}.{name}.weight", (8 if layer else 16, 4), "bfloat16")
    for layer in range(LAYERS)
    for name in ("q", "k")
]


def slice_table(tensors: list[Tensor], odd: int | None = None, *, whole: str = "") -> SliceTable:
    """Simulate the loader of rank 1 of two: its half of each tensor, q and k fused. Layer `odd` has the other half."""
    builder = SliceTableBuilder()
    for name, shape, dtype in tensors:
        if whole and whole in name:
            builder.add_whole(name, shape, dtype)
            continue
        rows = shape[0] // 2
        first = 0 if odd is not None and f".{odd}." in name else rows
        parameter = builder.parameter(name.replace(".q.", ".qk.").replace(".k.", ".qk."), dtype)
        at = rows * 4 if ".k." in name else 0
        builder.add(builder.tensor(name, shape), (first, 0, rows, 4), parameter, at, 4)
    return builder.build()


def test_sampled_layers_expand_to_the_whole_model() -> None:
    sampled = SampledLayers.of(TENSORS)
    names = [name for name, *_ in sampled.tensors]
    assert names == [name for name, *_ in TENSORS if name.split(".")[2] in ("weight", "0", "1", str(LAYERS - 1))]
    expanded = sampled.expand(slice_table(sampled.tensors))
    assert expanded is not None and expanded.digest == slice_table(TENSORS).digest


def test_unequal_layers_are_not_expanded() -> None:
    sampled = SampledLayers.of(TENSORS)
    assert sampled.expand(slice_table(sampled.tensors, odd=LAYERS - 1)) is None
    assert sampled.expand(slice_table(sampled.tensors, whole="layers.1.q")) is None
