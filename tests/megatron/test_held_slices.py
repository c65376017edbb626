"""Held slices inferred from numbered rows, columns and ranks, with stand-in bridges that join and split as mbridge does.
tests/megatron/test_layouts.py tests the real bridges."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megarl.megatron.held_slices import Forms


@dataclass(frozen=True)
class Places:
    tp_size: int = 1
    tp_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0


class Bridge:
    """A stand-in bridge: joins along rows, or along columns if the name says so; `cut` returns the checkpoint's tensors."""

    def __init__(self, mpu: Places, cut: Any) -> None:
        self.mpu, self._cut = mpu, cut

    def _weight_merge_across_tp(self, name: str, shards: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        assert len(shards) == self.mpu.tp_size, "experts are joined over their own ranks"
        return torch.cat(shards, dim=int("columns" in name))

    def _weight_to_hf_format(self, name: str, whole: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        parts = self._cut(whole)
        return [f"{name}.{number}" for number in range(len(parts))], parts

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        return [f"{name}.{number}" for number in range(len(self._cut(torch.empty(8, 8))))]


def held(bridge: Bridge, name: str, *shape: int) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    weight = torch.empty(shape, device="meta")
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    return [(form.shape, form.slices) for _, form in Forms(bridge).of(name, weight)]


def test_rows_and_columns_of_ranks() -> None:
    second = Places(tp_size=2, tp_rank=1)
    assert held(Bridge(second, lambda w: [w]), "rows", 4, 6) == [((8, 6), [(4, 0, 4, 6, 0, 0)])]
    assert held(Bridge(second, lambda w: [w]), "columns", 4, 6) == [((4, 12), [(0, 6, 4, 6, 0, 0)])]
    assert held(Bridge(second, lambda w: [w]), "rows", 6) == [((12,), [(0, 6, 1, 6, 0, 0)])]


def test_padding_is_omitted_and_fused_parts_are_split() -> None:
    """Each rank has three heads, each with two query rows and one key row."""

    def by_heads(whole: torch.Tensor) -> list[torch.Tensor]:
        heads = whole.view(-1, 3, whole.shape[1])
        return [heads[:, :2].reshape(-1, whole.shape[1]), heads[:, 2:].reshape(-1, whole.shape[1])]

    bridge = Bridge(Places(tp_size=2, tp_rank=1), lambda w: [w[:7]])
    assert held(bridge, "rows", 4, 2) == [((7, 2), [(4, 0, 3, 2, 0, 0)])]
    bridge = Bridge(Places(tp_size=2, tp_rank=1), by_heads)
    bridge._weight_name_mapping_mcore_to_hf = lambda name: ["q", "k"]  # type: ignore[method-assign]
    query, key = held(bridge, "rows", 9, 2)
    assert query == ((12, 2), [(6, 0, 2, 2, 0, 0), (8, 0, 2, 2, 3, 0), (10, 0, 2, 2, 6, 0)])
    assert key == ((6, 2), [(3, 0, 1, 2, 2, 0), (4, 0, 1, 2, 5, 0), (5, 0, 1, 2, 8, 0)])


def test_experts_are_joined_over_expert_tensor_ranks() -> None:
    bridge = Bridge(Places(tp_size=4, tp_rank=3, etp_size=2, etp_rank=1), lambda w: [w])
    assert held(bridge, "decoder.layers.3.mlp.experts.linear_fc1.weight7", 4, 6) == [((8, 6), [(4, 0, 4, 6, 0, 0)])]
    assert bridge.mpu.tp_size == 4, "the bridge's sizes are restored"


def test_held_slices_of_a_large_embedding_need_little_time() -> None:
    """Numbers for a large embedding would need 64 GB."""
    start = time.process_time()
    bridge = Bridge(Places(tp_size=16, tp_rank=15), lambda w: [w[:1_999_000]])
    assert held(bridge, "rows", 125_000, 8192) == [((1_999_000, 8192), [(1_875_000, 0, 124_000, 8192, 0, 0)])]
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "cut",
    [lambda w: [w.t().contiguous()], lambda w: [w + 1], lambda w: [w * 2], lambda w: [w.reshape(-1, 2)]],
    ids=["transposed", "shifted", "scaled", "reshaped"],
)
def test_a_part_that_is_not_a_slice_is_refused(cut: Any) -> None:
    with pytest.raises(ValueError, match="cannot be planned: mbridge's export of rows"):
        held(Bridge(Places(), cut), "rows", 4, 6)
