"""Micro batches: nothing lost, nothing over the limit, every rank equally often; and the scalars that go with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.batching.flops import ModelFlops
from megarl.batching.packing import EVEN, FULL, imbalance, plan_micro_batches, share, split_evenly
from megarl.batching.plan import held_out_weights, plan_held_out, plan_step
from megarl.recipe.schema import Recipe
from megarl.types import Group, InlineData, Sample


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    max_tokens=st.integers(10, 400),
    multiple_of=st.integers(1, 4),
    square=st.sampled_from([None, 0.0, 0.01, 1.0]),
)
def test_plan_invariants(
    lengths: list[int], ranks: int, max_tokens: int, multiple_of: int, square: float | None
) -> None:
    costs = None if square is None else [length + square * length**2 for length in lengths]
    check_invariants(lengths, ranks, max_tokens, multiple_of, costs)


def check_invariants(
    lengths: list[int], ranks: int, max_tokens: int, multiple_of: int, costs: list[float] | None
) -> None:
    plan = plan_micro_batches(lengths, ranks, max_tokens, multiple_of, costs)
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
    assert plan == plan_micro_batches(lengths, ranks, max_tokens, multiple_of, costs)
    assert 0 < share(plan, lengths, max_tokens) <= 1
    if len(lengths) >= ranks * len(plan[0]):  # a filler only where there are too few samples to go round
        assert not any(slot.filler for slot in slots)


def test_invariants_with_many_swaps() -> None:
    """Few samples per micro batch, costs that differ from token counts, and nearly full micro batches."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        ranks, multiple_of = int(rng.integers(1, 5)), int(rng.integers(1, 3))
        lengths = rng.integers(5, 100, rng.integers(40, 120)).tolist()
        rounds = rng.integers(2, 5) * ranks * multiple_of
        max_tokens = int(sum(lengths) / rounds * rng.uniform(1.01, 1.1))
        costs = rng.permutation(np.array(lengths) ** 1.5).tolist()
        check_invariants(lengths, ranks, max_tokens, multiple_of, costs)


# Of one forward pass, as megarl.batching.flops counts them: attention costs as much as the rest at 17 k tokens, and at 55 k.
QWEN3_30B_A3B = ModelFlops(6_666_000_000, 48 * 2 * 32 * 2 * 128)
QWEN3_8B = ModelFlops(15_137_000_000, 36 * 2 * 32 * 2 * 128)


def draw(name: str, count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    lengths = {
        "gsm8k": lambda: rng.normal(110, 30, count).clip(40) + rng.lognormal(np.log(200), 0.45, count),
        "lognormal": lambda: rng.lognormal(np.log(longest / 16), 1.0, count),
        "pareto": lambda: longest / 40 * (1 + rng.pareto(1.2, count)),
        "uniform": lambda: rng.uniform(20, longest, count),
    }[name]()
    return np.clip(lengths, 1, longest).astype(int)


def filling(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Return the first lengths that fit the token limit, and one more that fills the rest."""
    sums = lengths.cumsum()
    count = int(np.searchsorted(sums, tokens))
    assert 0 < count < len(lengths), "draw more"
    return np.append(lengths[:count], max(1, tokens - sums[count - 1]))


@pytest.mark.parametrize("model", [QWEN3_30B_A3B, QWEN3_8B], ids=["30b-a3b", "8b"])
@pytest.mark.parametrize(
    ("name", "longest", "max_tokens"),
    [
        ("gsm8k", 2048, 16384),
        ("gsm8k", 2048, 4096),
        ("lognormal", 8192, 32768),
        ("lognormal", 12288, 65536),
        ("pareto", 8192, 32768),
        ("uniform", 6144, 32768),
    ],
)
@pytest.mark.parametrize(("ranks", "multiple_of"), [(1, 1), (8, 1), (4, 4)])
def test_micro_batches_are_full_and_even_in_the_documented_range(
    model: ModelFlops, name: str, longest: int, max_tokens: int, ranks: int, multiple_of: int
) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        bins = ranks * multiple_of * int(rng.integers(3, 6)) * (1 if ranks > 1 else 4)
        lengths = filling(draw(name, 20_000, longest, rng), int(bins * max_tokens * rng.uniform(0.972, 0.988)))
        costs = model.of(lengths)
        plan = plan_micro_batches(lengths, ranks, max_tokens, multiple_of, costs)
        assert bins == ranks * len(plan[0])
        assert len(lengths) >= 8 * bins and costs.max() <= costs.sum() / bins / 2, "outside the documented range"
        assert share(plan, lengths, max_tokens) >= FULL
        assert imbalance(plan, costs) <= EVEN


@pytest.mark.parametrize(("fill", "added"), [(0.98, False), (0.9995, True)])
def test_micro_batches_are_added_only_if_that_evens_their_costs(fill: float, added: bool) -> None:
    lengths = filling(draw("gsm8k", 20_000, 2048, np.random.default_rng(0)), int(60 * 4096 * fill))
    costs = QWEN3_30B_A3B.of(lengths)
    plan = plan_micro_batches(lengths, 1, 4096, costs=costs)
    assert (len(plan[0]) > 60) == added
    assert share(plan, lengths, 4096) >= FULL and imbalance(plan, costs) <= EVEN


def test_few_long_samples_are_as_even_as_the_longest_allows() -> None:
    """Outside the documented range, the longest sample costs more than the mean, and no micro batch is larger than
    necessary."""
    lengths = draw("lognormal", 4000, 16384, np.random.default_rng(0))
    costs = QWEN3_30B_A3B.of(lengths)
    plan = plan_micro_batches(lengths, 8, 16384, costs=costs)
    assert share(plan, lengths, 16384) >= FULL
    bins = 8 * len(plan[0])
    assert imbalance(plan, costs) <= EVEN * costs.max() / (costs.sum() / bins)


def test_micro_batches_are_balanced_by_cost_not_by_tokens() -> None:
    """Two long samples, many short ones, attention's square: the long ones share their micro batch with fewer tokens."""
    lengths = [8000, 8000, *[500] * 64]
    costs = [length**2 for length in lengths]
    plan = plan_micro_batches(lengths, 2, 24000, 2, costs)
    tokens = [sum(lengths[slot.sample] for slot in batch) for rank in plan for batch in rank]
    assert sorted(len(batch) for rank in plan for batch in rank) == [1, 1, 32, 32]
    assert sorted(tokens) == [8000, 8000, 16000, 16000]


def test_micro_batches_at_one_position_have_similar_costs_on_all_ranks() -> None:
    """Ranks are even as a whole; at each place their micro batches are neighbours in cost, the least ones at both ends."""
    lengths = draw("lognormal", 200, 16384, np.random.default_rng(1))  # few samples, so micro batches differ
    costs = QWEN3_30B_A3B.of(lengths)
    plan = plan_micro_batches(lengths, 4, 16384, costs=costs)
    loads = np.array([[sum(costs[slot.sample] for slot in batch) for batch in rank] for rank in plan])
    assert np.ptp(loads.sum(axis=1)) <= np.ptp(loads, axis=0).max(), (
        "a rank that is ahead at one place is behind at others"
    )
    at_once = sorted(zip(loads.min(axis=0), loads.max(axis=0), strict=True))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(at_once))
    peak = int(loads.mean(axis=0).argmax())
    rise, fall = loads.mean(axis=0)[: peak + 1], loads.mean(axis=0)[peak:]
    assert 0 < peak < loads.shape[1] - 1 and (np.diff(rise) >= 0).all() and (np.diff(fall) <= 0).all()


def test_a_sample_over_the_limit_is_packed_alone() -> None:
    assert [len(rank) for rank in plan_micro_batches([1000, 10, 10], 1, 20)] == [2]


def test_best_fit_is_used_if_the_lightest_bin_is_full() -> None:
    """LPT puts a 5 into each bin, then a 4 into each, and 2 has no room; best fit finds 5 + 5 and 4 + 4 + 2."""
    plan = plan_micro_batches([5, 5, 4, 4, 2], 1, 10)
    assert sorted([slot.sample for slot in batch] for batch in plan[0]) == [[0, 1], [2, 3, 4]]


def test_split_evenly() -> None:
    assert [list(run) for run in split_evenly(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(run) for run in split_evenly(2, 5)] == [1, 1]
    assert split_evenly(0, 3) == []


def groups(*lengths_and_rewards: list[tuple[int, float]], finish: str = "stop") -> list[Group]:
    batch = []
    for number, members in enumerate(lengths_and_rewards):
        data = InlineData([])
        samples = [
            Sample(number, index, data, 3, length, length, reward=reward, finish_reason=finish)
            for index, (length, reward) in enumerate(members)
        ]
        batch.append(Group(number, f"row/{number}", "test", samples))
    return batch


def recipe(**algorithm: object) -> Recipe:
    config = Recipe()
    config.actor.mini_batches = 2
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def test_shards_have_global_normalizers() -> None:
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


def test_prompts_of_a_mini_batch_have_equal_weights() -> None:
    # One mini batch of two groups with 10 and 5 tokens: 1/20 and 1/10. token_sum divides every token by the divisor.
    batch = groups([(4, 1.0), (6, 0.0)], [(2, 0.0), (3, 1.0)])
    for name, divisor, expected in (
        ("prompt_mean", None, {4: 1 / 20, 6: 1 / 20, 2: 1 / 10, 3: 1 / 10}),
        ("token_sum", 5.0, dict.fromkeys((4, 6, 2, 3), 1 / 5)),
    ):
        config = recipe(aggregation=name, aggregation_divisor=divisor)
        config.actor.mini_batches = 1
        (shard,) = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1).shards
        assert {sample.length - 3: sample.loss_weight for sample in shard.samples} == pytest.approx(expected)


def test_gdpo_reads_the_parts_of_the_rewards() -> None:
    batch = groups([(4, 1.0), (6, 0.0)], [(2, 0.0), (3, 0.0)])
    for group in batch:
        for index, sample in enumerate(group.samples):
            sample.reward_parts = {"accuracy": sample.reward, "style": float(index)}
    batch[1].samples[0].reward_parts = {"accuracy": 0.0, "too_slow": 1.0}
    config = recipe(advantage="gdpo", reward_parts={"accuracy": 1.0, "style": 2.0})
    plan = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1)
    assert plan.outcomes.parts["style"].tolist() == [0, 1, 0, 1]
    signs = {sample.length - 3: np.sign(sample.advantage) for sample in plan.shards[0].samples}
    assert signs == {4: -1, 6: 1, 2: -1, 3: 1}, "style, with twice the weight, decides"
    config.algorithm.reward_parts = {"acuracy": 1.0}
    with pytest.raises(
        ValueError, match=r"names 'acuracy', which the reward does not report\. Its parts: accuracy, style"
    ):
        plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1)


def test_gdpo_continues_if_the_scorer_was_too_slow_for_a_whole_batch() -> None:
    batch = groups([(4, 0.0), (6, 0.0)])
    for sample in batch[0].samples:
        sample.reward_parts = {"accuracy": 0.0, "too_slow": 1.0}
    config = recipe(advantage="gdpo", reward_parts={"accuracy": 1.0, "style": 2.0})
    assert plan_step(batch, config, 1, 1).outcomes.parts["style"].tolist() == [0, 0]
    del batch[0].samples[1].reward_parts["too_slow"]
    with pytest.raises(ValueError, match=r"algorithm\.reward_parts names 'style'"):
        plan_step(batch, config, 1, 1)


def test_a_filler_has_loss_weight_zero() -> None:
    plan = plan_step(groups([(4, 1.0)], [(2, 0.0)]), recipe(), data_parallel=3, micro_batches_multiple_of=1)
    per_rank = [shard.samples[shard.mini_batches[0][0][0]].loss_weight for shard in plan.shards]
    assert sorted(per_rank) == pytest.approx([0, 0, 1 / 4])


def test_overlong_samples_do_not_count_in_the_normalizer() -> None:
    config = recipe()
    config.algorithm.overlong.filter = True
    batch = groups([(4, 1.0), (6, 0.0)], [(2, 0.0), (3, 1.0)])
    batch[0].samples[1].finish_reason = "length"
    plan = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1)
    assert plan.shards[0].loss_tokens == [4, 5]
    weights = {sample.length - 3: sample.loss_weight for sample in plan.shards[0].samples}
    assert weights == pytest.approx({4: 1 / 4, 6: 0, 2: 1 / 5, 3: 1 / 5})


def test_the_plan_reports_flops_share_and_imbalance() -> None:
    batch = groups([(10, 1.0)], [(5, 0.0), (1, 0.0), (1, 1.0)])  # mini batches of lengths 13, and 8, 4, 4
    config = recipe()
    config.actor.max_tokens_per_micro_batch = 16
    square = ModelFlops(per_token=-1, per_pair=2)  # l^2
    plan = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=2, model_flops=square)
    assert plan.flops == 13**2 + 8**2 + 4**2 + 4**2
    assert plan.metrics["actor/micro_batches"] == 4
    assert plan.metrics["perf/micro_batch_share"] == pytest.approx((13 + 8 + 4 + 4) / (4 * 16))
    # Mini batch 1 has a sample and an equally large filler; mini batch 2 has 64 and 32, and 48 would be even.
    assert plan.metrics["perf/micro_batch_imbalance"] == pytest.approx(64 / 48)
    assert plan_step(batch, config, 1, 2).flops == 0


@pytest.mark.parametrize("packing", [True, False])
def test_a_group_above_the_limit_counts_as_the_limit_in_the_share(packing: bool) -> None:
    batch = groups([(9, 1.0), (9, 0.0)], [(4, 1.0), (3, 0.0)])  # lengths 12 + 12, and 7 + 6
    config = recipe(loss="dpo", aggregation="seq_mean_token_mean")
    config.actor.mini_batches, config.actor.max_tokens_per_micro_batch = 1, 16
    config.megatron.packing = packing
    metrics = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1).metrics
    assert metrics["perf/micro_batch_share"] == pytest.approx((16 + 13) / (2 * 16))


def test_context_parallel_devices_share_a_micro_batch() -> None:
    """The limit is a device's: two that compute parts of each sequence take twice as much together."""
    batch, config = groups([(9, 1.0), (5, 0.0), (5, 0.0), (5, 1.0)]), recipe()  # lengths 12, 8, 8, 8
    config.actor.mini_batches, config.actor.max_tokens_per_micro_batch = 1, 12
    counts = {}
    for config.megatron.context_parallel in (1, 2):
        metrics = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=1).metrics
        counts[config.megatron.context_parallel] = (
            metrics["actor/micro_batches"], metrics["perf/micro_batch_share"] * metrics["actor/micro_batches"]
        )  # fmt: skip
    assert counts == {1: (4, pytest.approx(36 / 12)), 2: (2, pytest.approx(36 / 24))}


def test_a_step_is_planned_by_the_models_flops() -> None:
    batch = groups([(9, 1.0), (5, 0.0), (5, 0.0), (5, 1.0)])  # lengths 12, 8, 8, 8: 144, 64, 64, 64 FLOPs
    config = recipe()
    config.actor.mini_batches, config.actor.max_tokens_per_micro_batch = 1, 24
    square = ModelFlops(per_token=-1, per_pair=2)  # l^2

    def sizes(model_flops: ModelFlops | None) -> list[int]:
        plan = plan_step(batch, config, data_parallel=1, micro_batches_multiple_of=2, model_flops=model_flops)
        return sorted(len(micro_batch) for micro_batch in plan.shards[0].mini_batches[0])

    assert sizes(square) == [1, 3]  # 144 and 192
    assert sizes(None) == [2, 2]  # by tokens: 20 and 16


def test_a_piece_of_held_out_rows_has_the_weights_of_the_whole_set() -> None:
    """A piece of two rows, 4 and 6 tokens, of a set with 20: 1/20 a token, for each of two ranks in two micro batches."""
    config = recipe(loss="sft", advantage="none", aggregation="seq_mean_token_mean")
    config.train.source = "sft"
    weights = held_out_weights(np.array([4, 6, 10]), config)
    assert weights == pytest.approx([1 / 20] * 3)
    shards = plan_held_out(groups([(4, 0.0)], [(6, 0.0)]), weights[:2], 20, config, 2, micro_batches_multiple_of=2)
    assert [len(shard.mini_batches[0]) for shard in shards] == [2, 2]
    weighted = sorted((sample.length - 3, sample.loss_weight) for shard in shards for sample in shard.samples)
    assert weighted == [(4, 0.0), (4, 0.0), (4, pytest.approx(1 / 20)), (6, pytest.approx(1 / 20))]
    assert [shard.loss_tokens for shard in shards] == [[20], [20]]
    pairs = recipe(loss="dpo", aggregation="seq_mean_token_mean")
    assert held_out_weights(np.array([4, 5, 10, 2]), pairs) == pytest.approx([1 / 16, 1 / 20, 1 / 40, 1 / 8])


@pytest.mark.parametrize("packing", [True, False])
def test_the_samples_of_a_pair_share_a_micro_batch(packing: bool) -> None:
    """Chosen and rejected samples are adjacent at any limit; a filler is a whole pair."""
    random = np.random.default_rng(0)
    batch = groups(*([(int(a), 0.0), (int(b), 0.0)] for a, b in random.integers(1, 40, (7, 2))))
    config = recipe(loss="dpo", advantage="none", aggregation="seq_mean_token_mean")
    config.train.source = "preferences"
    config.megatron.packing, config.actor.max_tokens_per_micro_batch = packing, 60
    plan = plan_step(batch, config, data_parallel=3, micro_batches_multiple_of=2)
    counted = []
    for shard in plan.shards:
        for micro_batch in [members for mini_batch in shard.mini_batches for members in mini_batch]:
            numbers = [shard.samples[member].number for member in micro_batch]
            assert numbers[::2] == [number - 1 for number in numbers[1::2]] and not any(n % 2 for n in numbers[::2])
            weights = [shard.samples[member].loss_weight > 0 for member in micro_batch]
            assert weights[::2] == weights[1::2]
            counted += [number for number, weight in zip(numbers, weights, strict=True) if weight]
    assert sorted(counted) == list(range(14))
