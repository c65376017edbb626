"""Micro batches: nothing lost, nothing over the limit, every rank equally often; and the scalars that go with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import Recipe
from megarl.schedule import plan_micro_batches, split_evenly
from megarl.shards import plan_step
from megarl.types import Group, InlineData, Sample


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    max_tokens=st.integers(10, 400),
    multiple_of=st.integers(1, 4),
)
def test_plan_invariants(lengths: list[int], ranks: int, max_tokens: int, multiple_of: int) -> None:
    plan = plan_micro_batches(lengths, ranks, max_tokens, multiple_of)
    slots = [slot for rank in plan for micro_batch in rank for slot in micro_batch]
    assert sorted(slot.sample for slot in slots if not slot.filler) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple_of == 0
    for rank in plan:
        for micro_batch in rank:
            assert micro_batch
            tokens = sum(lengths[slot.sample] for slot in micro_batch)
            assert tokens <= max_tokens or len(micro_batch) == 1
            assert not any(slot.filler for slot in micro_batch) or len(micro_batch) == 1
    assert plan == plan_micro_batches(lengths, ranks, max_tokens, multiple_of)


def test_loads_are_balanced() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, size=512).tolist()
    plan = plan_micro_batches(lengths, 4, 8192)
    loads = [sum(lengths[slot.sample] for micro_batch in rank for slot in micro_batch) for rank in plan]
    assert max(loads) <= 1.01 * np.mean(loads)
    fewest = -(-sum(lengths) // (4 * 8192))
    assert len(plan[0]) <= fewest + 1


def test_split_evenly() -> None:
    assert [list(run) for run in split_evenly(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(run) for run in split_evenly(2, 5)] == [1, 1]
    assert split_evenly(0, 3) == []


def groups(*lengths_and_rewards: list[tuple[int, float]], finish: str = "stop") -> list[Group]:
    made = []
    for number, members in enumerate(lengths_and_rewards):
        data = InlineData([])
        samples = [
            Sample(number, index, data, 3, length, length, reward=reward, finish_reason=finish)
            for index, (length, reward) in enumerate(members)
        ]
        made.append(Group(number, f"row/{number}", "test", 0, samples))
    return made


def recipe(**algorithm: object) -> Recipe:
    made = Recipe()
    made.actor.mini_batches = 2
    for name, value in algorithm.items():
        setattr(made.algorithm, name, value)
    return made


def test_shards_carry_globally_counted_normalisers() -> None:
    # Two mini batches of one group: 4 + 6 = 10 tokens and 2 + 3 = 5; token-mean weighs 1/10 and 1/5.
    batch = groups([(4, 1.0), (6, 0.0)], [(2, 0.0), (3, 1.0)])
    plan = plan_step(batch, recipe(), data_parallel=2, micro_batches_multiple_of=1)
    assert [shard.loss_tokens for shard in plan.shards] == [[10, 5], [10, 5]]
    weights = {sample.length - 3: sample.loss_weight for shard in plan.shards for sample in shard.samples}
    assert weights == pytest.approx({4: 1 / 10, 6: 1 / 10, 2: 1 / 5, 3: 1 / 5})
    signs = {sample.length - 3: np.sign(sample.advantage) for shard in plan.shards for sample in shard.samples}
    assert signs == {4: 1, 6: -1, 2: -1, 3: 1}
    assert plan.metrics["response_length/mean"] == pytest.approx(15 / 4)
    assert plan.metrics["critic/rewards/mean"] == pytest.approx(0.5)


def test_a_filler_weighs_nothing() -> None:
    plan = plan_step(groups([(4, 1.0)], [(2, 0.0)]), recipe(), data_parallel=3, micro_batches_multiple_of=1)
    per_rank = [shard.samples[shard.mini_batches[0][0][0]].loss_weight for shard in plan.shards]
    assert sorted(per_rank) == pytest.approx([0, 0, 1 / 4])


def test_overlong_samples_leave_the_normaliser() -> None:
    made = recipe()
    made.algorithm.overlong.filter = True
    batch = groups([(4, 1.0), (6, 0.0)], [(2, 0.0), (3, 1.0)])
    batch[0].samples[1].finish_reason = "length"
    plan = plan_step(batch, made, data_parallel=1, micro_batches_multiple_of=1)
    assert plan.shards[0].loss_tokens == [4, 5]
    weights = {sample.length - 3: sample.loss_weight for sample in plan.shards[0].samples}
    assert weights == pytest.approx({4: 1 / 4, 6: 0, 2: 1 / 5, 3: 1 / 5})
