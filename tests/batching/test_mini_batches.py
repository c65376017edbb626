"""Assignment of groups to mini batches, by their order."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.packing import QWEN3_30B_A3B, over_ideal, siblings
from megarl.batching.mini_batches import as_sampled, balanced
from megarl.batching.plan import plan_step
from megarl.errors import RecipeError
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.environment import environment_notices, mini_batch_notice
from megarl.preflight.recipe.general import actor_errors
from megarl.recipe.schema import Recipe
from megarl.types import Group, InlineData, Sample


def batch(lengths: np.ndarray) -> list[Group]:
    """Return groups with responses of `lengths` [groups, samples] tokens, prompts of 3 and random rewards."""
    rewards = np.random.default_rng(1).random(lengths.shape)
    return [
        Group(
            number,
            f"row/{number}",
            "test",
            [
                Sample(number, index, InlineData([]), 3, int(tokens), int(tokens), reward=rewards[number, index])
                for index, tokens in enumerate(row)
            ],
        )
        for number, row in enumerate(lengths)
    ]


def ordered(order: str, mini_batches: int) -> Recipe:
    recipe = Recipe()
    recipe.actor.mini_batches, recipe.actor.mini_batch_order = mini_batches, order  # type: ignore[assignment]
    recipe.actor.max_tokens_per_micro_batch = 32_768
    return recipe


def test_groups_with_similarly_long_samples_share_a_mini_batch() -> None:
    costs = np.array([9.0, 1.0, 2.0, 2.0, 6.0, 6.0, 8.0, 1.0])  # the costliest of each of four groups: 9, 2, 6, 8
    parts = balanced(costs, [2, 2, 2, 2], 2, seed=0)
    assert sorted(part.tolist() for part in parts) == [[0, 3], [1, 2]]
    assert [part.tolist() for part in as_sampled(4, 2)] == [[0, 1], [2, 3]]


def test_every_group_is_in_one_mini_batch_and_the_order_of_mini_batches_changes_with_the_seed() -> None:
    costs = np.random.default_rng(0).random(7 * 3)
    orders = set()
    for seed in range(20):
        parts = balanced(costs, [3] * 7, 4, seed)
        assert sorted(np.concatenate(parts).tolist()) == list(range(7))
        assert sorted(map(len, parts)) == sorted(map(len, as_sampled(7, 4)))
        assert all(
            part.tolist() == again.tolist()
            for part, again in zip(parts, balanced(costs, [3] * 7, 4, seed), strict=True)
        )
        orders.add(tuple(part[0] for part in parts))
    assert len(orders) > 5


@pytest.mark.parametrize("mini_batches", [1, 4, 16])
def test_balanced_mini_batches_take_at_most_1_05_of_the_ideal(mini_batches: int) -> None:
    lengths = siblings(512, 16, seed=0)
    assert lengths.mean() == pytest.approx(2000, rel=0.01) and lengths.max() == 20_000
    parts = balanced(QWEN3_30B_A3B.of(lengths.ravel()), [16] * 512, mini_batches, seed=0)
    waits, rounds, _ = over_ideal(parts, lengths, QWEN3_30B_A3B, ranks=64, limit=32_768)
    assert 1.0 <= waits <= rounds <= 1.05


@pytest.mark.parametrize("order", ["as_sampled", "balanced"])
def test_mini_batches_and_weights_do_not_depend_on_the_layout(order: str) -> None:
    """Each optimizer step then has the loss that one rank computes (tests/megatron/test_loss_invariance.py)."""
    groups = batch(siblings(12, 4, seed=3))

    def steps(data_parallel: int, multiple_of: int) -> list[dict[int, float]]:
        plan = plan_step(groups, ordered(order, 3), data_parallel, multiple_of)
        return [
            {
                shard.samples[index].number: shard.samples[index].loss_weight
                for shard in plan.shards
                for micro_batch in shard.mini_batches[number]
                for index in micro_batch
                if shard.samples[index].loss_weight > 0
            }
            for number in range(3)
        ]

    whole = steps(1, 1)
    assert sorted(number for part in whole for number in part) == list(range(48))
    assert whole == steps(2, 1) == steps(5, 2)
    tokens = [sample.loss_tokens for group in groups for sample in group.samples]
    for part in whole:  # token_mean: the weights of a mini batch's tokens sum to 1
        assert sum(weight * tokens[number] for number, weight in part.items()) == pytest.approx(1.0)
    assert (whole[0].keys() == set(range(16))) == (order == "as_sampled")


def test_an_order_without_effect_is_refused() -> None:
    (error,) = actor_errors(ordered("balanced", 1))
    assert isinstance(error, RecipeError) and "one mini batch" in str(error)
    assert not list(actor_errors(ordered("as_sampled", 1)))
    critic = ordered("balanced", 1)
    critic.critic.mini_batches = 4  # as sampled
    assert "one mini batch" in str(*actor_errors(critic))
    recipe = ordered("balanced", 2)
    recipe.data.prompts_per_step = 4
    assert not list(actor_errors(recipe))


def test_a_notice_says_that_the_order_changes_the_loss() -> None:
    """With token_mean a mini batch of long samples gives each token a smaller weight; a mean over samples has the same weights."""
    recipe = ordered("balanced", 2)
    recipe.algorithm.aggregation = "token_mean"
    notice = "actor.mini_batch_order=balanced with algorithm.aggregation=token_mean changes the loss"
    assert [text[: len(notice)] for text in environment_notices(recipe, CPUPlatform())].count(notice) == 1
    recipe.algorithm.aggregation = "seq_mean_token_mean"
    assert mini_batch_notice(recipe) is None
    assert mini_batch_notice(ordered("as_sampled", 2)) is None
