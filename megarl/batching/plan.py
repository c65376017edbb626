"""Lay a batch out over data-parallel ranks: advantages, loss weights, mini and micro batches. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algorithms.aggregation import aggregate
from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, LOSSES
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.shaping import counts_in_loss, group_numbers, reward_part
from megarl.batching.flops import ModelFlops
from megarl.batching.limits import token_limit
from megarl.batching.metrics import PackingMetrics, length_metrics, mean_max_min, reward_metrics
from megarl.batching.mini_batches import as_sampled, balanced
from megarl.batching.packing import Plan, expand, offsets, plan_micro_batches
from megarl.batching.padding import plan_padded_micro_batches
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import ActorConfig
from megarl.types import Group, Metrics, Sample, Shard, ShardSample, Steps


@dataclass
class StepPlan:
    """The shards of all data-parallel ranks, and the batch's outcomes, metrics and FLOPs, which need no forward pass."""

    shards: list[Shard]
    metrics: Metrics
    outcomes: Outcomes  # of all samples of the batch
    flops: float  # of one forward pass over the batch; 0 if `model_flops` is None
    update_flops: float  # of the actor's forward and backward passes


def plan_step(
    groups: Sequence[Group],
    recipe: Recipe,
    data_parallel: int,
    micro_batches_multiple_of: int,
    model_flops: ModelFlops | None = None,
) -> StepPlan:
    """Lay out one batch over `data_parallel` ranks.

    Mini batches are whole groups, chosen by `actor.mini_batch_order`. All normalizers are counted here, over a whole mini batch,
    before it is split. Micro batches are balanced by FLOPs, or by tokens if `model_flops` is None. Raises ValueError if
    the batch lacks greedy samples, step rewards or reward parts that the advantage estimator needs.
    """
    samples = [sample for group in groups for sample in group.samples]
    outcomes = _outcomes(groups, samples, recipe.algorithm)
    estimates = _estimates(outcomes, recipe.algorithm)
    step_advantages = _step_advantages(outcomes, recipe.algorithm, samples)
    firsts = offsets([len(group.samples) for group in groups])
    lengths, costs = _lengths_and_costs(samples, model_flops)
    mini_batches = _mini_batches(groups, costs, recipe.actor)
    members = [np.concatenate([np.arange(firsts[index], firsts[index + 1]) for index in part]) for part in mini_batches]
    loss_weights = np.zeros(len(samples))
    for part in members:
        loss_weights[part] = _loss_weights(outcomes, part, recipe)
    weighted = _WeightedSamples(
        samples,
        group_indices=_group_indices(outcomes.groups),
        advantages=np.zeros(len(samples)) if estimates is None else estimates,
        step_advantages=step_advantages,
        loss_tokens=outcomes.loss_tokens,
        loss_weights=loss_weights,
    )
    shards, packing = _empty_shards(data_parallel), PackingMetrics()
    for indices, part in zip(mini_batches, members, strict=True):
        sizes = _bundle_sizes([groups[index] for index in indices], recipe.algorithm)
        plan = plan_mini_batch(lengths[part], costs[part], sizes, recipe, data_parallel, micro_batches_multiple_of)
        packing.add(plan, lengths[part], costs[part], token_limit(recipe))
        _add_mini_batch(shards, plan, int(outcomes.loss_tokens[part].sum()), weighted, part)
    metrics = {**length_metrics(samples, outcomes.loss_tokens), **packing.metrics()}
    if recipe.train.source == "rollout":  # demonstrations are not scored
        metrics.update(_outcome_metrics(samples, outcomes, estimates, step_advantages))
    if model_flops is None:
        return StepPlan(shards, metrics, outcomes, 0.0, 0.0)
    update = model_flops.of_update(lengths, frozen=recipe.lora.rank > 0)
    return StepPlan(shards, metrics, outcomes, float(costs.sum()), float(update.sum()) * recipe.actor.epochs)


def _mini_batches(groups: Sequence[Group], costs: np.ndarray, actor: ActorConfig) -> list[np.ndarray]:
    """Return the indices of the groups of each mini batch. costs [B]: of the samples."""
    if actor.mini_batch_order == "as_sampled" or not groups:
        return as_sampled(len(groups), actor.mini_batches)
    sizes = [len(group.samples) for group in groups]
    return balanced(costs, sizes, actor.mini_batches, seed=groups[0].number)


def held_out_weights(loss_tokens: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the weight of each sample's tokens in eval/loss: loss_tokens [B] of all held-out samples -> weights [B].

    eval/loss is a mean over tokens, or over groups for a loss that compares siblings, whatever `algorithm.aggregation` is.
    """
    name = "seq_mean_token_mean" if LOSSES[recipe.algorithm.loss].whole_groups else "token_mean"
    return AGGREGATIONS[name](loss_tokens, recipe.rollout.max_response_length)


def plan_held_out(
    groups: Sequence[Group],
    weights: np.ndarray,
    loss_tokens: int,
    recipe: Recipe,
    data_parallel: int,
    micro_batches_multiple_of: int,
    model_flops: ModelFlops | None = None,
) -> list[Shard]:
    """Lay out some of the held-out rows over `data_parallel` ranks, as one mini batch for evaluation only.

    `weights` [B] of their samples and `loss_tokens` are counted over all held-out rows, so metrics of several such
    batches can simply be summed.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths, costs = _lengths_and_costs(samples, model_flops)
    sizes = _bundle_sizes(groups, recipe.algorithm)
    plan = plan_mini_batch(lengths, costs, sizes, recipe, data_parallel, micro_batches_multiple_of)
    weighted = _WeightedSamples(
        samples,
        group_indices=_group_indices(group_numbers(groups)),
        advantages=np.zeros(len(samples)),
        step_advantages=[()] * len(samples),
        loss_tokens=np.array([sample.loss_tokens for sample in samples]),
        loss_weights=weights,
    )
    shards = _empty_shards(data_parallel)
    _add_mini_batch(shards, plan, loss_tokens, weighted, np.arange(len(samples)))
    return shards


def _empty_shards(count: int) -> list[Shard]:
    return [Shard(samples=[], mini_batches=[], loss_tokens=[]) for _ in range(count)]


def _lengths_and_costs(samples: Sequence[Sample], model_flops: ModelFlops | None) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([sample.length for sample in samples])
    return lengths, model_flops.of(lengths) if model_flops else lengths.astype(np.float64)


def _bundle_sizes(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[int]:
    """Return the sizes of runs of adjacent samples that stay together: groups if the loss compares siblings, else 1."""
    sizes = [len(group.samples) for group in groups]
    return sizes if LOSSES[algorithm.loss].whole_groups else [1] * sum(sizes)


def _group_indices(numbers: np.ndarray) -> np.ndarray:
    """Return the index of each sample's group among the groups of the batch, in the order of their numbers: [B]."""
    return np.unique(numbers, return_inverse=True)[1]


def _outcomes(groups: Sequence[Group], samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Outcomes:
    """Return the outcomes of all samples. A sample that overlong filtering leaves out of the loss has no loss tokens."""
    step_rewards, step_samples = _step_rewards_of(samples)
    return Outcomes(
        rewards=np.array([sample.reward for sample in samples], dtype=np.float64),
        groups=group_numbers(groups),
        loss_tokens=np.array(
            [sample.loss_tokens if counts_in_loss(sample, algorithm.overlong.filter) else 0 for sample in samples]
        ),
        greedy_rewards=_greedy_rewards(groups),
        step_rewards=step_rewards,
        step_samples=step_samples,
        parts=_reward_parts(samples, algorithm),
    )


def _estimates(outcomes: Outcomes, algorithm: AlgorithmConfig) -> np.ndarray | None:
    """Return the advantage of each sample [B]; None if the estimator needs the tokens, or rewards still lack the KL."""
    function = ADVANTAGES[algorithm.advantage].function
    return None if function is None or algorithm.kl_in_reward else function(outcomes, algorithm)


def _outcome_metrics(
    samples: Sequence[Sample], outcomes: Outcomes, estimates: np.ndarray | None, step_advantages: Sequence[Steps]
) -> Metrics:
    """Return metrics of rewards, and of advantages unless they are computed later (`estimates` is None)."""
    metrics = reward_metrics(samples)
    if outcomes.greedy_rewards is not None:
        metrics["critic/rewards/greedy"] = float(np.mean(outcomes.greedy_rewards))
    if estimates is not None:
        metrics.update(mean_max_min("critic/advantages", estimates + _step_sums(step_advantages)))
    return metrics


def _loss_weights(outcomes: Outcomes, members: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the weight of each sample's tokens in the loss of a mini batch with samples `members`."""
    aggregation = AGGREGATIONS[recipe.algorithm.aggregation]
    divisor = recipe.algorithm.aggregation_divisor or recipe.rollout.max_response_length
    return aggregate(aggregation, outcomes.loss_tokens[members], divisor, outcomes.groups[members])


def _step_rewards_of(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards [S] of all steps of the batch, and the sample index of each [S]."""
    rewards = [reward for sample in samples for _, reward in sample.steps]
    counts = [len(sample.steps) for sample in samples]
    return np.array(rewards, dtype=np.float64), np.repeat(np.arange(len(samples)), counts)


def _step_advantages(outcomes: Outcomes, algorithm: AlgorithmConfig, samples: Sequence[Sample]) -> list[Steps]:
    """Return the step advantages of each sample; empty for an estimator without step advantages.

    Raises ValueError if the estimator needs step rewards and the scorer returned none.
    """
    estimator = ADVANTAGES[algorithm.advantage]
    if estimator.of_steps is None:
        return [()] * len(samples)
    if not any("steps" in sample.reward_parts for sample in samples):
        raise ValueError(
            f"algorithm.advantage is '{algorithm.advantage}', which needs rewards of steps, and the scorer returned "
            "no steps for any sample of the batch. Return `steps` (an empty list for a response without steps), or "
            "choose another algorithm.advantage"
        )
    advantages = iter(estimator.of_steps(outcomes, algorithm).tolist())
    return [tuple((token, next(advantages)) for token, _ in sample.steps) for sample in samples]


def _step_sums(steps: Sequence[Steps]) -> np.ndarray:
    """Return the sum of each sample's step advantages [B]."""
    return np.array([sum(number for _, number in sample_steps) for sample_steps in steps])


def _reward_parts(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> dict[str, np.ndarray]:
    """Return the parts in `algorithm.reward_parts` of each sample [B]. Raises ValueError as `reward_part` does."""
    return {
        name: np.array([reward_part(sample, name, "algorithm.reward_parts") for sample in samples], dtype=np.float64)
        for name in algorithm.reward_parts
    }


def _greedy_rewards(groups: Sequence[Group]) -> np.ndarray | None:
    """Return the greedy reward of each sample's group [B]; None without greedy samples.

    Raises ValueError if only some groups have a greedy sample.
    """
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    if rewards and len(rewards) < len(groups):
        raise ValueError(
            f"{len(groups) - len(rewards)} of {len(groups)} groups have no greedy sample: they were sampled before "
            "algorithm.advantage was changed. Resume with the advantage that they were sampled for"
        )
    return np.repeat(rewards, [len(group.samples) for group in groups]) if rewards else None


def plan_mini_batch(
    lengths: np.ndarray, costs: np.ndarray, sizes: Sequence[int], recipe: Recipe, data_parallel: int, multiple_of: int
) -> Plan:
    """Return the micro batches of one mini batch; runs of adjacent samples, with lengths `sizes`, stay together."""
    limit = token_limit(recipe)
    if recipe.megatron.packing:
        plan = plan_micro_batches(
            lengths=_bundle_sums(lengths, sizes),
            ranks=data_parallel,
            max_tokens=limit,
            multiple_of=multiple_of,
            costs=_bundle_sums(costs, sizes),
        )
        return expand(plan, sizes)
    # A padded bundle costs its size x its longest sample.
    longest = np.maximum.reduceat(lengths, offsets(sizes)[:-1])
    padded = [size * length for size, length in zip(sizes, longest, strict=True)]
    return expand(plan_padded_micro_batches(padded, data_parallel, limit, multiple_of), sizes)


def _bundle_sums(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the sum of each run of adjacent values: the first `sizes[0]` values, the next `sizes[1]`, ..."""
    return np.add.reduceat(values, offsets(sizes)[:-1])


@dataclass(frozen=True)
class _WeightedSamples:
    """The samples of a batch, with the advantages that need no forward pass and their weights in the loss."""

    samples: Sequence[Sample]
    group_indices: np.ndarray  # [B]: of each sample's group within the batch
    advantages: np.ndarray  # [B]
    step_advantages: Sequence[Steps]  # of each sample
    loss_tokens: np.ndarray  # [B]
    loss_weights: np.ndarray  # [B]: of each loss token

    def shard_sample(self, number: int, *, filler: bool) -> ShardSample:
        """Return sample `number` of the batch as a trainer needs it; a filler has weight 0."""
        sample = self.samples[number]
        counts = not filler and self.loss_tokens[number] > 0
        return ShardSample(
            data=sample.data,
            index=sample.index,
            length=sample.length,
            number=number,
            group=int(self.group_indices[number]),
            reward=sample.outcome,
            advantage=float(self.advantages[number]),
            loss_weight=float(self.loss_weights[number]) if counts else 0.0,
            steps=sample.steps,
            step_advantages=self.step_advantages[number],
            prompt_length=sample.prompt_length,
            spans=sample.spans,
        )


def _add_mini_batch(
    shards: Sequence[Shard], plan: Plan, loss_tokens: int, weighted: _WeightedSamples, members: np.ndarray
) -> None:
    """Append the micro batches of `plan` to each shard.

    `plan` numbers the samples of the mini batch. `members`: their numbers in the batch. `loss_tokens`: of the mini batch.
    """
    for shard, micro_batches in zip(shards, plan, strict=True):
        shard.loss_tokens.append(loss_tokens)
        shard.mini_batches.append([])
        for micro_batch in micro_batches:
            first = len(shard.samples)
            shard.samples.extend(
                weighted.shard_sample(int(members[slot.sample]), filler=slot.filler) for slot in micro_batch
            )
            shard.mini_batches[-1].append(list(range(first, len(shard.samples))))


@dataclass(frozen=True)
class VectorRoute:
    """Samples that are in two shards of the same batch: their indices in the source and in the target shard, pairwise."""

    source: list[int]
    target: list[int]


def routes(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[list[VectorRoute]]:
    """Return the routes [source shard][target shard] of the samples that count in the loss.

    Sources and targets hold the same batch in different layouts. Each such sample of a target is in exactly one route.
    """
    source_of = {
        sample.number: (rank, index)
        for rank, shard in enumerate(sources)
        for index, sample in enumerate(shard.samples)
        if sample.loss_weight > 0
    }
    table = [[VectorRoute([], []) for _ in targets] for _ in sources]
    for rank, shard in enumerate(targets):
        for index, sample in enumerate(shard.samples):
            if sample.loss_weight > 0:
                source, source_index = source_of[sample.number]
                table[source][rank].source.append(source_index)
                table[source][rank].target.append(index)
    return table
