"""MXFP4 weights of experts, as gpt-oss is published.

Format: OCP Microscaling Formats 1.0. `NAME_blocks` [experts, out, groups, 16] has two values of 4 bits in a byte, the first
in the low bits, and `NAME_scales` [experts, out, groups] the exponent of each group of 32 values, plus 127. An element is
value * 2^exponent, which bfloat16 holds exactly. The tensor NAME is [experts, in, out], transposed as transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.commands.convert_weights.layout import TensorEntry
from megarl.commands.convert_weights.shards import Format, StoredTensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""

_BYTES = 16  # of a group
_ROWS = 512  # converted at a time: in between, an element takes eight times its bytes


class Mxfp4(Format):
    """Groups of 32 values along the inputs of each expert's linear."""

    values, scales, name = "_blocks", "_scales", "MXFP4"

    def __str__(self) -> str:
        return f"MXFP4 in groups of {2 * _BYTES}"

    def is_quantized(self, entry: TensorEntry) -> bool:
        return entry.dtype == "U8" and entry.name.endswith(self.values)

    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        experts, rows, groups, size = entry.shape
        return experts, groups * size * 2, rows

    def check_pair(self, where: str, values: TensorEntry, scales: TensorEntry) -> None:
        if len(values.shape) != 4 or values.shape[3] != _BYTES:
            raise ValueError(f"{where} is {list(values.shape)}, not [experts, out, groups, {_BYTES}]")
        if scales.dtype != "U8" or scales.shape != values.shape[:3]:
            expected = f"in U8 of shape {list(values.shape[:3])}"
            raise ValueError(f"{where} needs scales {expected}; they are in {scales.dtype}, {list(scales.shape)}")

    def convert(self, values: StoredTensor, scales: StoredTensor) -> Iterator[memoryview]:
        """Yield one expert after the other."""
        import torch

        experts, rows, groups, size = values.entry.shape
        positive = torch.tensor(VALUES)
        of_code = torch.cat([positive, -positive])
        of_byte = torch.stack([of_code.repeat(16), of_code.repeat_interleave(16)], 1)  # low bits, then high bits
        for expert in range(experts):
            raw = values.read(expert * rows * groups * size, rows * groups * size)
            exponents = scales.read(expert * rows * groups, rows * groups)
            factors = torch.frombuffer(exponents, dtype=torch.uint8).double().sub_(127).exp2_().float()
            weight = torch.empty(rows, groups * size * 2, dtype=torch.bfloat16)
            for first in range(0, rows, _ROWS):
                part = weight[first : first + _ROWS]
                begin, count = first * groups, len(part) * groups
                codes = torch.frombuffer(raw, dtype=torch.uint8, count=count * size, offset=begin * size)
                elements = of_byte[codes.int()].view(count, 2 * size)
                part.copy_((elements * factors[begin : begin + count, None]).view(part.shape))
            yield weight.t().contiguous().view(torch.uint8).numpy().reshape(-1).data
