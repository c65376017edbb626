"""Advantages by position in the actor's processes: a group's samples on several ranks and in several micro batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.optimal_baseline import group_lengths
from megarl.batching.plan import plan_step
from megarl.recipe.schema import Recipe
from megarl.trainer.actor import ActorWorker
from megarl.trainer.token_recorder import TokenRecorder
from megarl.types import Group, InlineData, Sample, SampleTokens

PROMPT = 2
RESPONSES = {40: [3, 6, 4], 7: [5, 2, 2], 23: [6, 6, 1]}
"""Response lengths by group number; the numbers are not in order."""


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.algorithm.advantage, recipe.algorithm.overlong.filter = "optimal_token_baseline", True
    recipe.actor.mini_batches, recipe.cluster.device = 1, "cpu"
    return recipe


def batch() -> list[Group]:
    random = np.random.default_rng(0)
    groups = []
    for number, responses in RESPONSES.items():
        data = InlineData(
            [
                SampleTokens(np.arange(PROMPT + n), np.arange(PROMPT + n) >= PROMPT, np.zeros(PROMPT + n, np.float32))
                for n in responses
            ]
        )
        samples = [
            Sample(
                number, index, data, PROMPT, n, n, reward=float(random.normal()),
                finish_reason="length" if (number, index) == (7, 0) else "stop",
            )
            for index, n in enumerate(responses)
        ]  # fmt: skip
        groups.append(Group(number, "row", "test", samples))
    return groups


def computed(recipe: Recipe, data_parallel: int) -> dict[int, list[float]]:
    """Advantages of the loss tokens of each sample, by number in the batch. The ranks run twice: first to collect their sums."""
    plan = plan_step(batch(), recipe, data_parallel, 1)
    sums: list[np.ndarray] = []

    def exchange(local: np.ndarray) -> np.ndarray:
        sums.append(local)
        return np.sum(sums[:data_parallel], axis=0)

    for _ in range(2):
        actors = [estimated(recipe, shard, exchange, group_lengths(plan.outcomes)) for shard in plan.shards]
    by_number = {}
    for actor in actors:
        for (micro_batch, members), advantages in zip(actor._micro_batches(), actor.token_advantages, strict=True):
            mask = micro_batch.vectors["loss_mask"].numpy() > 0
            bounds = np.cumsum(micro_batch.lengths)[:-1]
            for member, values, of_loss in zip(
                members, np.split(advantages, bounds), np.split(mask, bounds), strict=True
            ):
                if of_loss.any():
                    by_number[actor.numbers[member]] = values[of_loss].tolist()
    return by_number


def estimated(recipe: Recipe, shard: Any, exchange: Any, lengths: list[int]) -> Any:
    """An actor without a model: log-probs and squares follow from the sample's number and the position."""
    actor: Any = object.__new__(ActorWorker)
    actor.recipe, actor.platform, actor.token_kl = recipe, SimpleNamespace(device=lambda: "cpu"), {}
    coordinates = SimpleNamespace(reports=True, is_last_stage=True)
    actor.trainer = SimpleNamespace(coordinates=coordinates, sum_over_data_parallel=exchange)
    actor.recorder = TokenRecorder(0)
    actor.load_shard(shard)
    for micro_batch, members in actor._micro_batches():
        vectors = [of_sample(actor.numbers[member], n) for member, n in zip(members, micro_batch.lengths, strict=True)]
        micro_batch.vectors["old_log_probs"] = torch.cat([log_probs for log_probs, _ in vectors])
        actor.squares.append(torch.cat([squares for _, squares in vectors]))
    actor.estimate_advantages(0.0, lengths)
    return actor


def of_sample(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(number)
    return torch.from_numpy(-random.exponential(size=length)), torch.from_numpy(random.random(length))


def by_definition() -> dict[int, list[float]]:
    samples, got = [sample for group in batch() for sample in group.samples], {}
    weights = {}
    for number, sample in enumerate(samples):
        log_probs, squares = (vector.numpy()[PROMPT:] for vector in of_sample(number, sample.length))
        weights[number] = np.cumsum(np.maximum(1 - 2 * np.exp(log_probs) + squares, 0)) + 1e-8
    for number, sample in enumerate(samples):
        if sample.truncated:
            continue
        group = [n for n, other in enumerate(samples) if other.group == sample.group and not other.truncated]
        got[number] = []
        for k in range(sample.response_length):
            left = [n for n in group if samples[n].response_length > k]
            total = sum(weights[n][k] for n in left)
            got[number].append(sample.reward - sum(samples[n].reward * weights[n][k] for n in left) / total)
    return got


@pytest.mark.parametrize(("data_parallel", "max_tokens"), [(1, 1000), (1, 8), (2, 8), (4, 16)])
def test_a_groups_samples_may_be_anywhere(recipe: Recipe, data_parallel: int, max_tokens: int) -> None:
    """Also with the fillers of ranks that have fewer samples, and a truncated sample that the loss excludes."""
    recipe.actor.max_tokens_per_micro_batch = max_tokens
    got, expected = computed(recipe, data_parallel), by_definition()
    assert sorted(got) == sorted(expected) and len(expected) == 8
    for number, advantages in expected.items():
        assert got[number] == pytest.approx(advantages, rel=1e-6, abs=1e-9)
