"""Rewards of steps on their way from the scorer's sample to the advantages of tokens, against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.moments import Whitening
from megarl.algorithms.process_advantages import step_returns, step_rewards_per_token
from megarl.algorithms.returns import gae, returns_to_go
from megarl.batching.plan import plan_step
from megarl.recipe.schema import Recipe
from megarl.trainer.actor import ActorWorker
from megarl.trainer.critic import CriticWorker
from megarl.trainer.token_recorder import TokenRecorder
from megarl.types import Group, InlineData, Sample, SampleTokens, Steps
from tests.support.loss_cases import settings

TURNS = np.array([0, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
"""A prompt token, a turn of two, a tool's answer of two, a turn of three."""


class TestPlaces:
    def test_a_step_reward_belongs_to_the_last_loss_token_before_its_end(self) -> None:
        """A step that ends in the tool's answer belongs to the last token before it, one in the prompt to the first; of
        two that one token ends, both count."""
        steps = ((0, 1.0), (2, 2.0), (3, 4.0), (5, 8.0), (7, 16.0), (7, 32.0))
        assert step_rewards_per_token(steps, TURNS).tolist() == [0, 1, 6, 0, 0, 8, 0, 48]
        assert step_returns(steps, TURNS)[TURNS].tolist() == [63, 62, 56, 48, 48]

    def test_samples_without_steps_or_loss_tokens_have_no_step_rewards(self) -> None:
        assert step_rewards_per_token((), TURNS).tolist() == [0] * 8
        excluded = step_rewards_per_token(((3, 1.0),), np.zeros(8, dtype=bool))
        assert excluded.tolist() == [0] * 8, "a sample that does not count"


class TestReturns:
    steps = (
        (2, 2.0),
        (4, 4.0),
        (6, 8.0),
    )  # on the second token of the first turn (two of them), the second of the second
    outcome = np.array([16.0])

    def test_returns_to_go(self) -> None:
        """gamma 1/2, chosen tokens earn 0, 6, 0, 8, 16: from the end 16, 8 + 16/2 = 16, 8, 6 + 8/2 = 10, 5."""
        token_rewards = step_rewards_per_token(self.steps, TURNS)
        got = returns_to_go(self.outcome, TURNS, [8], gamma=0.5, token_rewards=token_rewards)
        assert got.tolist() == [0, 5, 10, 0, 0, 8, 16, 16]

    def test_gae(self) -> None:
        """gamma 1/2, lambda 1/2, values 1, 2, 4, 2, 8 of chosen tokens. Deltas r + V'/2 - V: 0 + 1 - 1 = 0,
        6 + 2 - 2 = 6, 0 + 1 - 4 = -3, 8 + 4 - 2 = 10, 16 - 8 = 8. A = delta + A'/4: 8, 12, 0, 6, 1.5."""
        values = np.array([9.0, 1, 2, 9, 9, 4, 2, 8])
        advantages, returns = gae(
            self.outcome,
            values,
            TURNS,
            [8],
            gamma=0.5,
            lam=0.5,
            token_rewards=step_rewards_per_token(self.steps, TURNS),
        )
        assert advantages.tolist() == [0, 1.5, 6, 0, 0, 0, 12, 8]
        assert returns.tolist() == [0, 2.5, 8, 0, 0, 4, 14, 16]


def batch(steps: list[list[Steps]], outcomes: list[list[float]], masks: dict[tuple[int, int], Any]) -> list[Group]:
    """Groups of samples of a prompt token and seven others, all chosen where `masks` does not say otherwise."""
    groups = []
    for number, (of_group, ends) in enumerate(zip(steps, outcomes, strict=True)):
        vectors, samples = [], []
        for index, (steps, outcome) in enumerate(zip(of_group, ends, strict=True)):
            mask = masks.get((number, index), np.arange(8) > 0)
            vectors.append(SampleTokens(np.arange(8, dtype=np.int32), mask, np.zeros(8, dtype=np.float32)))
            earned = sum(reward for _, reward in steps)
            samples.append(
                Sample(
                    number, index, InlineData(vectors), 1, 7, int(mask.sum()), reward=outcome + earned,
                    reward_parts={"steps": earned}, steps=steps,
                )
            )  # fmt: skip
        groups.append(Group(number, "row", "test", samples))
    return groups


def worker(kind: type[ActorWorker] | type[CriticWorker], recipe: Recipe) -> Any:
    """One that trains nothing: its model, processes and device are left out."""
    instance: Any = object.__new__(kind)
    instance.recipe, instance.platform = recipe, SimpleNamespace(device=lambda: "cpu")
    instance.trainer = SimpleNamespace(coordinates=SimpleNamespace(reports=True, is_last_stage=True))
    instance.recorder = TokenRecorder(0)
    return instance


def computed_advantages(recipe: Recipe, groups: list[Group], data_parallel: int = 1) -> dict[int, list[float]]:
    """Advantages of the chosen tokens of each sample that counts, by number in the batch, as the update will see them."""
    by_sample = {}
    for shard in plan_step(groups, recipe, data_parallel, 1).shards:
        actor = worker(ActorWorker, recipe)
        actor.load_shard(shard)
        if ADVANTAGES[recipe.algorithm.advantage].of_tokens:
            actor.estimate_advantages(0.0, [])
            actor.whiten_advantages(Whitening())
        for micro_batch, members in actor._micro_batches():
            vectors = zip(*(micro_batch.vectors[name].split(8) for name in ("advantages", "loss_mask")), strict=True)
            for member, (advantages, mask) in zip(members, vectors, strict=True):
                if shard.samples[member].loss_weight > 0:
                    by_sample[shard.samples[member].number] = advantages[mask > 0].tolist()
    return by_sample


@pytest.fixture
def recipe() -> Recipe:
    config = Recipe()
    config.algorithm.whiten_advantages, config.actor.max_tokens_per_micro_batch = False, 24
    return config


STEPS: list[list[Steps]] = [[((2, 1.0), (4, 3.0)), ((7, 5.0),), ()], [((3, -1.0), (3, -3.0)), ((1, 2.0),), ((7, 0.0),)]]
OUTCOMES = [[4.0, 0.0, 2.0], [1.0, 1.0, 1.0]]


class TestReinforcePlusPlus:
    def test_a_step_reward_counts_once_at_the_token_that_ends_the_step(self, recipe: Recipe) -> None:
        """Without a discount, advantages are returns-to-go, with the outcome at every token."""
        recipe.algorithm.advantage = "reinforce_plus_plus"
        got = computed_advantages(recipe, batch(STEPS, OUTCOMES, {(0, 0): TURNS}))
        # 1 and 3 (which ends in the tool's answer) are both the second token's: 4 + 4, 4 + 4, 4, 4, 4.
        assert got == {
            0: [8, 8, 4, 4, 4], 1: [5] * 7, 2: [2] * 7,
            3: [-3, -3, -3, 1, 1, 1, 1], 4: [3, 1, 1, 1, 1, 1, 1], 5: [1] * 7,
        }  # fmt: skip

    def test_with_the_kl_in_the_reward(self, recipe: Recipe) -> None:
        """A KL of 1 at each token with weight 1/2 is taken besides: steps 1 at the second of seven tokens, outcome 4."""
        recipe.algorithm.advantage, recipe.algorithm.kl_in_reward = "reinforce_plus_plus", True
        shard = plan_step(batch([[((2, 1.0),), ()]], [[4.0, 0.0]], {}), recipe, 1, 1).shards[0]
        actor = worker(ActorWorker, recipe)
        actor.load_shard(shard)
        actor.token_kl = {number: np.append(0.0, np.ones(7)) for number in (0, 1)}
        actor.estimate_advantages(0.5, [])
        (got,) = actor.token_advantages
        assert sorted(got.reshape(2, 8)[:, 1:].tolist()) == [
            [-3.5, -3, -2.5, -2, -1.5, -1, -0.5], [1.5, 2, 1.5, 2, 2.5, 3, 3.5],
        ]  # fmt: skip

    def test_the_overlong_penalty_applies_to_the_last_token(self, recipe: Recipe) -> None:
        """The punishment of long responses changes a sample's reward after it was scored: gamma 1/2, step 1, outcome 4 - 2."""
        groups = batch([[((6, 1.0),), ()]], [[4.0, 0.0]], {})
        groups[0].samples[0].reward -= 2.0
        recipe.algorithm.advantage, recipe.algorithm.gamma = "reinforce_plus_plus", 0.5
        assert computed_advantages(recipe, groups)[0][-2:] == [2.0, 2.0]


def test_the_critic_includes_step_rewards(recipe: Recipe) -> None:
    """With lambda 1 and values of 0, advantages are returns-to-go, as in REINFORCE++."""
    recipe.algorithm.advantage, recipe.algorithm.lam = "gae", 1.0
    groups = batch(STEPS, OUTCOMES, {(0, 0): TURNS})
    shard = plan_step(groups, recipe, 1, 1).shards[0]
    critic = worker(CriticWorker, recipe)
    critic.load_shard(shard)
    critic.trainer.values = lambda batches: [torch.zeros(len(micro_batch.tokens)) for micro_batch in batches]
    critic.compute_values([], 0.0)
    got = {shard.samples[number].number: advantages[mask] for number, (advantages, mask) in critic.advantages.items()}
    recipe.algorithm.advantage = "reinforce_plus_plus"
    assert {number: values.tolist() for number, values in got.items()} == computed_advantages(recipe, groups)


def test_the_critic_subtracts_no_kl_for_samples_outside_the_loss(recipe: Recipe) -> None:
    """The actor sends no KL of fillers and of samples outside the loss."""
    recipe.algorithm.advantage, recipe.algorithm.lam = "gae", 1.0
    shard = plan_step(batch([[(), ()]], [[4.0, 0.0]], {}), recipe, 1, 1).shards[0]
    critic = worker(CriticWorker, recipe)
    critic.load_shard(shard)
    critic.trainer.values = lambda batches: [torch.zeros(len(micro_batch.tokens)) for micro_batch in batches]
    first = next(number for number, sample in enumerate(shard.samples) if sample.number == 0)
    critic.compute_values([(InlineData([np.append(0.0, np.ones(7)).astype(np.float32)]), [first])], 0.5)
    got = {shard.samples[number].number: advantages[mask] for number, (advantages, mask) in critic.advantages.items()}
    # Seven tokens, each a penalty of 1/2, and an outcome of 4 at the end; the other sample earns nothing.
    assert got[0].tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5] and got[1].tolist() == [0] * 7


class TestGrpoProcess:
    def test_by_hand(self, recipe: Recipe) -> None:
        """Step rewards without outcomes, as in the paper. First group: 1, 3 and 5 have mean 3 and squared deviations 4
        + 0 + 4 = 8; 8 / (3 - 1) gives the standard deviation 2, and normalized rewards -1, 0 and 1. Second group: -1,
        -3, 2, 0 have mean -1/2 and squared deviations 1/4 + 25/4 + 25/4 + 1/4 = 13, over 3."""
        recipe.algorithm.advantage = "grpo_process"
        got = computed_advantages(recipe, batch(STEPS, [[7.0] * 3, [0.0] * 3], {(0, 0): TURNS}))
        assert got[0] == pytest.approx([-1, -1, 0, 0, 0], abs=1e-6), "both steps are the second token's"
        assert got[1] == pytest.approx([1] * 7, rel=1e-6) and got[2] == [0] * 7
        unit = 1 / (np.sqrt(13 / 3) + 1e-6)
        assert got[3] == pytest.approx([-3 * unit] * 3 + [0] * 4)
        assert got[4] == pytest.approx([2.5 * unit] + [0] * 6) and got[5] == pytest.approx([0.5 * unit] * 7)

    def test_outcomes_are_normalized_separately_from_steps(self, recipe: Recipe) -> None:
        """4, 0 and 2: mean 2, standard deviation 2: 1, -1 and 0 at every token, plus the steps' advantages."""
        recipe.algorithm.advantage = "grpo_process"
        got = computed_advantages(recipe, batch(STEPS, OUTCOMES, {(0, 0): TURNS}))
        assert got[0] == pytest.approx([0, 0, 1, 1, 1], abs=1e-6)
        assert got[1] == pytest.approx([0] * 7, abs=1e-6) and got[2] == pytest.approx([0] * 7, abs=1e-6)
        assert got[3][-1] == 0, "all of the second group have the same outcome"
        recipe.algorithm.normalize_by_std = False
        assert computed_advantages(recipe, batch(STEPS, OUTCOMES, {(0, 0): TURNS}))[0] == [0, 0, 2, 2, 2], (
            "-2 and 0 up to there"
        )

    def test_a_group_of_one_has_no_advantage(self, recipe: Recipe) -> None:
        recipe.algorithm.advantage = "grpo_process"
        assert computed_advantages(recipe, batch([[((2, 1.0), (4, 3.0))]], [[4.0]], {}))[0] == [0] * 7

    def test_slow_reference(self, recipe: Recipe) -> None:
        """Group by group and token by token, as the paper writes it; whatever the data-parallel split, in mini batches."""
        random = np.random.default_rng(3)
        steps: list[list[Steps]] = [
            [
                tuple((int(end), float(random.normal())) for end in sorted(random.integers(1, 8, random.integers(4))))
                for _ in range(random.integers(2, 5))
            ]
            for _ in range(6)
        ]
        outcomes = [random.normal(size=len(group_steps)).tolist() for group_steps in steps]
        expected, number = {}, 0
        for group_steps, ends in zip(steps, outcomes, strict=True):
            rewards = [reward for sample in group_steps for _, reward in sample]
            mean = np.mean(rewards) if rewards else 0.0
            std = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
            for sample, outcome in zip(group_steps, ends, strict=True):
                at_all = (outcome - np.mean(ends)) / (np.std(ends, ddof=1) + 1e-6)
                expected[number] = [
                    at_all + sum((reward - mean) / (std + 1e-6) for end, reward in sample if end >= token)
                    for token in range(1, 8)
                ]
                number += 1
        recipe.algorithm.advantage, recipe.actor.mini_batches = "grpo_process", 3
        for data_parallel in (1, 3):
            got = computed_advantages(recipe, batch(steps, outcomes, {}), data_parallel)
            assert sorted(got) == sorted(expected)
            for sample, advantages in expected.items():
                assert got[sample] == pytest.approx(advantages, rel=1e-5, abs=1e-5)

    def test_a_scorer_without_step_rewards_is_refused(self, recipe: Recipe) -> None:
        recipe.algorithm.advantage = "grpo_process"
        groups = batch([[(), ()]], [[1.0, 0.0]], {})
        assert computed_advantages(recipe, groups)[0] == pytest.approx([np.sqrt(0.5)] * 7, rel=1e-5), (
            "without steps it is plain GRPO"
        )
        for sample in groups[0].samples:
            sample.reward_parts = {}
        with pytest.raises(
            ValueError, match="'grpo_process', which needs rewards of steps, and the scorer returned no"
        ):
            computed_advantages(recipe, groups)


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus", "grpo_process"])
def test_steps_of_zero_change_nothing(recipe: Recipe, advantage: str) -> None:
    recipe.algorithm.advantage = advantage
    none, zero = [[(), (), ()]], [[((2, 0.0), (5, 0.0)), ((7, 0.0),), ()]]
    got = [computed_advantages(recipe, batch(steps, [[4.0, 0.0, 2.0]], {(0, 0): TURNS})) for steps in (none, zero)]
    assert got[0] == got[1]


def test_sample_level_estimators_use_outcome_plus_steps(recipe: Recipe) -> None:
    """4 + 1 + 3, 0 + 5 and 2: mean 5."""
    recipe.algorithm.normalize_by_std = False
    got = computed_advantages(recipe, batch(STEPS[:1], OUTCOMES[:1], {}))
    assert [values[0] for values in (got[0], got[1], got[2])] == [3, 0, -3]


def test_metrics(recipe: Recipe) -> None:
    recipe.algorithm.advantage, recipe.algorithm.normalize_by_std = "grpo_process", False
    metrics = plan_step(batch(STEPS[:1], OUTCOMES[:1], {}), recipe, 1, 1).metrics
    assert metrics["critic/rewards/mean"] == 5 and metrics["critic/score/steps/mean"] == 3
    assert (metrics["critic/step_count/mean"], metrics["critic/step_count/max"], metrics["critic/step_count/min"]) == (
        1,
        2,
        0,
    )
    assert metrics["critic/advantages/max"] == 0, "of first tokens: 2 - 2 + 0, -2 + 2, 0"
    for group in (groups := batch([[(), ()]], [[1.0, 0.0]], {})):
        for sample in group.samples:
            sample.reward_parts = {}
    recipe.algorithm.advantage = "grpo"
    assert not [name for name in plan_step(groups, recipe, 1, 1).metrics if "step" in name]


def test_step_estimators_accept_a_batch_without_steps() -> None:
    outcomes = Outcomes(np.array([1.0, 0.0]), np.array([3, 3]), np.ones(2))
    assert ADVANTAGES["grpo_process"].of_steps(outcomes, settings()).tolist() == []
