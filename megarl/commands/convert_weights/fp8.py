"""FP8 weights with block scales, as DeepSeek-V3 and Kimi-K2 are published.

Format: README_WEIGHTS.md of deepseek-ai/DeepSeek-V3. A matrix NAME is stored in float8_e4m3fn, and `NAME_scale_inv` has a
factor for each block of rows and columns. Blocks at the edges are smaller. The value of an element is element * factor in
float32, rounded to bfloat16 (nearest, ties to even).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.commands.convert_weights.layout import TensorEntry
from megarl.commands.convert_weights.shards import CHUNK, Format, StoredTensor

if TYPE_CHECKING:
    import torch

SCALE_DTYPES = ("F32", "BF16")


@dataclass(frozen=True)
class Fp8Blocks(Format):
    """`rows` and `columns`: of the block that has a scale."""

    rows: int
    columns: int

    values, scales, name = "", "_scale_inv", "FP8 e4m3"

    def __str__(self) -> str:
        return f"FP8 in blocks of {self.rows} x {self.columns}"

    def is_quantized(self, entry: TensorEntry) -> bool:
        return entry.dtype == "F8_E4M3"

    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        return entry.shape

    def check_pair(self, where: str, values: TensorEntry, scales: TensorEntry) -> None:
        if scales.dtype not in SCALE_DTYPES:
            raise ValueError(f"{where} has scales in {scales.dtype}; supported: {' and '.join(SCALE_DTYPES)}")
        expected = tuple(-(-size // side) for size, side in zip(values.shape, (self.rows, self.columns), strict=False))
        if len(values.shape) != 2 or scales.shape != expected:
            shapes = f"{list(values.shape)}, its scales {list(scales.shape)}"
            raise ValueError(
                f"{where} is {shapes}; blocks of {self.rows} x {self.columns} need scales {list(expected)}"
            )

    def convert(self, values: StoredTensor, scales: StoredTensor) -> Iterator[memoryview]:
        rows, columns = values.entry.shape
        factors = _float32(scales)
        step = max(CHUNK // max(columns, 1) // self.rows, 1) * self.rows  # rows at a time, a multiple of blocks
        for first in range(0, rows, step):
            count = min(step, rows - first)
            blocks = factors[first // self.rows : -(-(first + count) // self.rows)]
            yield self._to_bfloat16(values.read(first * columns, count * columns), (count, columns), blocks)

    def _to_bfloat16(self, raw: bytearray, shape: tuple[int, int], scales: torch.Tensor) -> memoryview:
        """Convert float8_e4m3fn bytes to bfloat16 bytes. `shape`: rows and columns; the first row begins a block."""
        import torch

        values = torch.frombuffer(raw, dtype=torch.float8_e4m3fn).to(torch.float32).view(shape)
        factors = scales.repeat_interleave(self.columns, dim=1)[:, : shape[1]]
        for number, row in enumerate(factors):
            values[number * self.rows : (number + 1) * self.rows] *= row
        return values.to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1).data


def _float32(scales: StoredTensor) -> torch.Tensor:
    import torch

    dtype = torch.bfloat16 if scales.entry.dtype == "BF16" else torch.float32
    return torch.frombuffer(scales.read(0, scales.entry.size), dtype=dtype).float().reshape(scales.entry.shape)
