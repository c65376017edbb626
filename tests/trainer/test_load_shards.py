"""Ranks that share a shard fetch the groups of its samples once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from megarl.recipe.schema import Recipe
from megarl.trainer.group import TrainerGroup
from megarl.types import InlineData, SampleTokens, Shard, ShardSample, fetch

fetched: list[str] = []


@dataclass(frozen=True)
class StoredData:
    """Vectors of a group outside the process. Notes in `fetched` when they are fetched."""

    name: str
    samples: tuple[SampleTokens, ...]

    def get(self) -> list[Any]:
        fetched.append(self.name)
        return [*self.samples]


class Workers:
    """Ranks without a model."""

    kept, failure = False, None

    def __init__(self, size: int) -> None:
        self.size, self.loaded = size, list[list[int]]()

    def scatter_with_data(self, method: str, per_rank: list[tuple[Any, ...] | None], parts: int) -> list[Any]:
        assert method == "gather_vectors" and parts == 1
        return [
            args and (None, [StoredData(f"rank {rank}", tuple(fetch(*args)))]) for rank, args in enumerate(per_rank)
        ]

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> None:
        assert method == "load_shard"
        self.loaded = [[int(vectors.tokens[0]) for vectors in fetch(shard.samples)] for (shard,) in per_rank]


def vectors(number: int) -> SampleTokens:
    return SampleTokens(np.array([number], np.int32), np.ones(1, bool), np.zeros(1, np.float32))


def shards_of(groups: list[Any]) -> list[Shard]:
    """Two shards with a sample of each group: the first samples backwards, the second ones forwards."""
    first = [ShardSample(group, 0, 1) for group in reversed(groups)]
    second = [ShardSample(group, 1, 1) for group in groups]
    return [Shard(samples, [[[0, 1]]], [2]) for samples in (first, second)]


def load(groups: list[Any], ranks_of_shard: int) -> list[list[int]]:
    """Return what each rank has loaded."""
    workers = Workers(2 * ranks_of_shard)
    trainers = TrainerGroup(cast(Any, workers), Recipe())
    trainers.ranks = [{"dp_rank": rank % 2, "dp_size": 2} for rank in range(workers.size)]  # as with pipeline stages
    fetched.clear()
    trainers.load_shards(shards_of(groups))
    return workers.loaded


STORED = [StoredData(f"group {number}", (vectors(10 * number), vectors(10 * number + 1))) for number in (1, 2)]


@pytest.mark.parametrize("ranks_of_shard", [1, 3])
def test_every_rank_has_its_samples_in_their_order(ranks_of_shard: int) -> None:
    assert load(STORED, ranks_of_shard) == [[20, 10], [11, 21]] * ranks_of_shard


def test_groups_are_fetched_once_for_each_shard() -> None:
    load(STORED, 3)
    assert sorted(fetched) == sorted([*["group 1", "group 2"] * 2, *["rank 0", "rank 1"] * 3])


def test_a_rank_alone_fetches_the_groups() -> None:
    load(STORED, 1)
    assert sorted(fetched) == ["group 1", "group 1", "group 2", "group 2"]


def test_vectors_that_come_with_the_shards_are_left_there() -> None:
    assert load([InlineData([*data.samples]) for data in STORED], 3) == [[20, 10], [11, 21]] * 3
    assert fetched == []
