"""Data, settings and results of a caller's own training loop. Plain values; no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from megarl.batching.packing import Slot, plan_micro_batches


@dataclass(frozen=True)
class Datum:
    """One sequence: `targets[i]` is predicted after `tokens[0]` to `tokens[i]`.

    Example, two prompt tokens and an answer of two: ``Datum(tokens=array([5, 8, 2]), targets=array([8, 2, 7]),
    vectors={"weights": array([0, 1, 1])})``. Targets usually are the tokens that follow, but need not be.
    """

    tokens: np.ndarray  # int64 [N]
    targets: np.ndarray  # int64 [N]
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)  # float32 [N] each: what the loss reads

    def __post_init__(self) -> None:
        sizes = {"targets": len(self.targets)} | {name: len(vector) for name, vector in self.vectors.items()}
        assert len(self.tokens) > 0 and set(sizes.values()) == {len(self.tokens)}, (len(self.tokens), sizes)


@dataclass(frozen=True)
class AdamParams:
    """Settings of one update with AdamW. The defaults equal the Tinker API's. Raises ValueError for impossible values."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled; norms and biases have none
    grad_clip_norm: float = 0.0  # largest global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            bounded = each.name.startswith("beta")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= sys.float_info.max:
                raise ValueError(f"{each.name} is {value!r}; it must be a finite number, at least 0")
            if bounded and value >= 1:
                raise ValueError(f"{each.name} is {value:g}; it must be below 1")


@dataclass(frozen=True)
class DatumShard:
    """The data of one data-parallel rank in a pass. Every rank has the same number of micro batches."""

    data: list[Datum]
    numbers: list[int]  # index of each datum in the caller's list
    micro_batches: list[list[Slot]]  # indices into `data`


@dataclass(frozen=True)
class DatumScores:
    """Result of a pass: the sum of the loss, and log-probs of each datum's targets, float32 [N], by the datum's number."""

    loss: float
    log_probs: dict[int, np.ndarray]


def lay_out(
    data: Sequence[Datum], data_parallel: int, max_tokens: int, micro_batches_multiple_of: int
) -> list[DatumShard]:
    """Distribute `data` over data-parallel ranks, in micro batches of at most `max_tokens` tokens."""
    lengths = [len(datum.tokens) + 1 for datum in data]  # with the last target: see `DatumWorker`
    shards = []
    for micro_batches in plan_micro_batches(lengths, data_parallel, max_tokens, micro_batches_multiple_of):
        numbers = sorted({slot.sample for micro_batch in micro_batches for slot in micro_batch})
        place = {number: index for index, number in enumerate(numbers)}
        local = [[Slot(place[slot.sample], slot.filler) for slot in micro_batch] for micro_batch in micro_batches]
        shards.append(DatumShard([data[number] for number in numbers], numbers, local))
    return shards
