"""Lay a batch out over data-parallel ranks: advantages, loss weights, mini and micro batches. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.algorithms.advantages import AdvantageEstimator
from megarl.algorithms.aggregation import aggregate
from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, LOSSES
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.shaping import counts_in_loss, group_numbers, reward_part
from megarl.batching.flops import ModelFlops
from megarl.batching.limits import token_limit
from megarl.batching.packing import Plan, Slot, expand, imbalance, plan_micro_batches, share, split_evenly
from megarl.batching.padding import plan_padded_micro_batches
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.schema import Recipe
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

    Mini batches are runs of whole groups in admission order. All normalizers are counted here, over a whole mini batch,
    before it is split. Micro batches are balanced by FLOPs, or by tokens if `model_flops` is None. Raises ValueError if
    the batch lacks greedy samples or step rewards that the advantage estimator needs.
    """
    samples = [sample for group in groups for sample in group.samples]
    loss_tokens = np.array(
        [sample.loss_tokens if counts_in_loss(sample, recipe.algorithm.overlong.filter) else 0 for sample in samples]
    )
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    outcomes = Outcomes(
        rewards,
        group_numbers(groups),
        loss_tokens,
        _greedy_rewards(groups),
        *_step_rewards_of(samples),
        _reward_parts(samples, recipe.algorithm),
    )
    estimator = ADVANTAGES[recipe.algorithm.advantage]
    estimate = None if recipe.algorithm.kl_in_reward else estimator.function
    advantages = estimate(outcomes, recipe.algorithm) if estimate else np.zeros(len(samples))
    step_advantages = _step_advantages(estimator, outcomes, recipe.algorithm, samples)
    scored = _ScoredSamples(samples, _places(outcomes.groups), advantages, step_advantages)
    lengths, costs = _lengths_and_costs(samples, model_flops)
    packing = _Packing()
    firsts = np.cumsum([0] + [len(group.samples) for group in groups])
    shards = [Shard(samples=[], mini_batches=[], loss_tokens=[]) for _ in range(data_parallel)]
    for run in split_evenly(len(groups), recipe.actor.mini_batches):
        members = range(firsts[run.start], firsts[run.stop])
        sizes = _bundles(groups[run.start : run.stop], recipe.algorithm)
        tokens = loss_tokens[members.start : members.stop]
        divisor = recipe.algorithm.aggregation_divisor or recipe.rollout.max_response_length
        numbers = outcomes.groups[members.start : members.stop]
        weights = aggregate(AGGREGATIONS[recipe.algorithm.aggregation], tokens, divisor, numbers)
        run_lengths, run_costs = lengths[members], costs[members]
        plan = plan_mini_batch(run_lengths, run_costs, sizes, recipe, data_parallel, micro_batches_multiple_of)
        packing.add(plan, run_lengths, run_costs, token_limit(recipe))
        _add_mini_batch(shards, plan, int(tokens.sum()), scored, members, tokens, weights)
    metrics = {**_length_metrics(samples, loss_tokens), **packing.metrics()}
    if recipe.train.source == "rollout":  # demonstrations are not scored
        metrics.update(_reward_metrics(samples))
        if outcomes.greedy_rewards is not None:
            metrics["critic/rewards/greedy"] = float(np.mean(outcomes.greedy_rewards))
        if estimate:  # otherwise advantages are computed later
            metrics.update(spread("critic/advantages", advantages + _sums(step_advantages)))
    if model_flops is None:
        return StepPlan(shards, metrics, outcomes, 0.0, 0.0)
    update = model_flops.of_update(lengths, frozen=recipe.lora.rank > 0)
    return StepPlan(shards, metrics, outcomes, float(costs.sum()), float(update.sum()) * recipe.actor.epochs)


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
    plan = plan_mini_batch(
        lengths, costs, _bundles(groups, recipe.algorithm), recipe, data_parallel, micro_batches_multiple_of
    )
    shards = [Shard(samples=[], mini_batches=[], loss_tokens=[]) for _ in range(data_parallel)]
    tokens = np.array([sample.loss_tokens for sample in samples])
    places = _places(group_numbers(groups))
    scored = _ScoredSamples(samples, places, np.zeros(len(samples)), [()] * len(samples))
    _add_mini_batch(shards, plan, loss_tokens, scored, range(len(samples)), tokens, weights)
    return shards


def _lengths_and_costs(samples: Sequence[Sample], model_flops: ModelFlops | None) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([sample.length for sample in samples])
    return lengths, model_flops.of(lengths) if model_flops else lengths.astype(np.float64)


def _bundles(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[int]:
    """Return the sizes of runs of adjacent samples that stay together: groups if the loss compares siblings, else 1."""
    sizes = [len(group.samples) for group in groups]
    return sizes if LOSSES[algorithm.loss].whole_groups else [1] * sum(sizes)


def _places(numbers: np.ndarray) -> np.ndarray:
    """Return the index of each sample's group among the groups of the batch, in the order of their numbers: [B]."""
    return np.unique(numbers, return_inverse=True)[1]


def _step_rewards_of(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards [S] of all steps of the batch, and the sample index of each [S]."""
    rewards = [reward for sample in samples for _, reward in sample.steps]
    counts = [len(sample.steps) for sample in samples]
    return np.array(rewards, dtype=np.float64), np.repeat(np.arange(len(samples)), counts)


def _step_advantages(
    estimator: AdvantageEstimator, outcomes: Outcomes, algorithm: AlgorithmConfig, samples: Sequence[Sample]
) -> list[Steps]:
    """Return the step advantages of each sample; empty for an estimator without step advantages.

    Raises ValueError if the estimator needs step rewards and the scorer returned none.
    """
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


def _sums(steps: Sequence[Steps]) -> np.ndarray:
    """Return the sum of each sample's step advantages [B]."""
    return np.array([sum(number for _, number in sample_steps) for sample_steps in steps])


def sums_of(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the sum of each run of adjacent values: the first `sizes[0]` values, the next `sizes[1]`, ..."""
    return np.add.reduceat(values, np.cumsum([0, *sizes[:-1]]))


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
        bundles = sums_of(lengths, sizes), data_parallel, limit, multiple_of, sums_of(costs, sizes)
        return expand(plan_micro_batches(*bundles), sizes)
    # A padded bundle costs its size x its longest sample.
    longest = np.maximum.reduceat(lengths, np.cumsum([0, *sizes[:-1]]))
    padded = [size * length for size, length in zip(sizes, longest, strict=True)]
    return expand(plan_padded_micro_batches(padded, data_parallel, limit, multiple_of), sizes)


@dataclass
class _Packing:
    """Fill and balance of the micro batches of each mini batch."""

    counts: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)

    def add(self, plan: Plan, lengths: np.ndarray, costs: np.ndarray, max_tokens: int) -> None:
        self.counts.append(len(plan[0]))
        self.shares.append(share(plan, lengths, max_tokens))
        self.imbalances.append(imbalance(plan, costs))

    def metrics(self) -> Metrics:
        return {
            "actor/micro_batches": float(sum(self.counts)),
            "perf/micro_batch_share": float(np.average(self.shares, weights=self.counts)),
            "perf/micro_batch_imbalance": max(self.imbalances),
        }


@dataclass(frozen=True)
class _ScoredSamples:
    """The samples of a batch, with the advantages that need no forward pass."""

    samples: Sequence[Sample]
    places: np.ndarray  # [B]: index of each sample's group within the batch
    advantages: np.ndarray  # [B]
    step_advantages: Sequence[Steps]  # of each sample


def _add_mini_batch(
    shards: Sequence[Shard],
    plan: Plan,
    loss_tokens: int,
    scored: _ScoredSamples,
    members: range,
    tokens: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Append the micro batches of `plan` to each shard.

    Indices in `plan`, `tokens` and `weights` are positions in `members`, the batch indices of the mini batch's samples.
    """
    for shard, micro_batches in zip(shards, plan, strict=True):
        shard.loss_tokens.append(loss_tokens)
        shard.mini_batches.append(
            [
                [_place(shard, slot, scored, members, tokens, weights) for slot in micro_batch]
                for micro_batch in micro_batches
            ]
        )


def _place(
    shard: Shard, slot: Slot, scored: _ScoredSamples, members: range, tokens: np.ndarray, weights: np.ndarray
) -> int:
    """Append one sample to a shard; return its index there."""
    number = members[slot.sample]
    sample = scored.samples[number]
    counts = not slot.filler and tokens[slot.sample] > 0
    shard.samples.append(
        ShardSample(
            data=sample.data,
            index=sample.index,
            length=sample.length,
            number=number,
            group=int(scored.places[number]),
            reward=sample.outcome,
            advantage=float(scored.advantages[number]),
            loss_weight=float(weights[slot.sample]) if counts else 0.0,
            steps=sample.steps,
            step_advantages=scored.step_advantages[number],
            prompt_length=sample.prompt_length,
            spans=sample.spans,
        )
    )
    return len(shard.samples) - 1


def _length_metrics(samples: Sequence[Sample], loss_tokens: np.ndarray) -> Metrics:
    """Return metrics of the batch's lengths (tokens), under verl's names."""
    return {
        **spread("response_length", [sample.response_length for sample in samples]),
        **spread("prompt_length", [sample.prompt_length for sample in samples]),
        "response_length/clip_ratio": float(np.mean([sample.truncated for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.length for sample in samples)),
        "actor/loss_tokens": float(loss_tokens.sum()),
    }


def _reward_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return metrics of the batch's rewards and reward parts."""
    metrics = spread("critic/rewards", [sample.reward for sample in samples])
    if any("steps" in sample.reward_parts for sample in samples):
        metrics.update(spread("critic/step_count", [len(sample.steps) for sample in samples]))
    for part in sorted({name for sample in samples for name in sample.reward_parts}):
        metrics.update(spread(f"critic/score/{part}", [sample.reward_parts.get(part, 0.0) for sample in samples]))
    return metrics


def spread(name: str, values: Sequence[float] | np.ndarray) -> Metrics:
    """Return mean, maximum and minimum as metrics."""
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


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
