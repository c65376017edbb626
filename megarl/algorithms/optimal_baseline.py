"""Optimal token baseline, and sums over the tokens of a group at the same position, which several ranks may hold. Pure.

The position of a loss token is its number among the loss tokens of its sample; tool output is skipped. Sums are [K, slots]: a
slot for each position of the batch's first group, then of the second, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megarl.algorithms.advantages import ADVANTAGES, AdvantageEstimator, PositionEstimator
from megarl.algorithms.inputs import Outcomes, TokenOutcomes
from megarl.algorithms.returns import returns_to_go
from megarl.recipe.algorithm import AlgorithmConfig

_LEAST_WEIGHT = 1e-8
"""Added to each W: where the policy chose every token with certainty, the baseline is the mean."""


def group_lengths(outcomes: Outcomes) -> list[int]:
    """Return the number of positions of each group, in the order of `ShardSample.group`: the loss tokens of its longest
    sample."""
    numbers, places = np.unique(outcomes.groups, return_inverse=True)
    longest = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(longest, places, outcomes.loss_tokens)
    return longest.tolist()


def position_slots(outcomes: TokenOutcomes, lengths: Sequence[int]) -> np.ndarray:
    """Return the slot of each loss token: int64 [number of loss tokens]. lengths: `group_lengths` of the batch."""
    assert outcomes.groups is not None
    starts = np.cumsum(lengths) - lengths
    counts = [int(part.sum()) for part in _by_sample(outcomes.mask, outcomes.lengths)]
    positions = [start + np.arange(count) for start, count in zip(starts[outcomes.groups], counts, strict=True)]
    return np.concatenate(positions)


def sums_by_position(parts: Iterable[tuple[TokenOutcomes, np.ndarray]], lengths: Sequence[int]) -> np.ndarray:
    """Sum the terms [K, T] of the loss tokens of several micro batches by slot: [K, slots]. Sums of several ranks add up."""
    sums = np.zeros((0, 0))
    for outcomes, terms in parts:
        sums = sums if sums.size else np.zeros((len(terms), sum(lengths)))
        slots = position_slots(outcomes, lengths)
        for of_slots, row in zip(sums, terms, strict=True):
            np.add.at(of_slots, slots, row[outcomes.mask])
    return sums


def at_tokens(outcomes: TokenOutcomes, sums: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return the sums [K, slots] at each token's position: [K, T]; 0 for excluded tokens."""
    values = np.zeros((len(sums), len(outcomes.mask)))
    values[:, outcomes.mask] = sums[:, position_slots(outcomes, lengths)]
    return values


def gradient_energy(outcomes: TokenOutcomes) -> np.ndarray:
    """Return W_t of each loss token, the sum over the sample's loss tokens up to t of (1 - 2 p + sum_v p_v^2) w^2: float64 [T].

    That factor is the squared norm of the gradient of log p with respect to the logits, and w the token's correction weight.
    """
    assert outcomes.log_probs is not None and outcomes.squares is not None
    energy = np.maximum(1.0 - 2.0 * np.exp(outcomes.log_probs) + outcomes.squares, 0.0)
    if outcomes.weights is not None:
        energy = energy * outcomes.weights**2
    energy = np.where(outcomes.mask, energy, 0.0)
    return np.concatenate([np.cumsum(part) for part in _by_sample(energy, outcomes.lengths)])


def _terms(outcomes: TokenOutcomes) -> np.ndarray:
    """Return G W, W and 1 for each loss token [3, T]. G and W count as 0 where a correction rejects the token."""
    counted = outcomes.mask if outcomes.weights is None else outcomes.mask & (outcomes.weights > 0)
    weight = (gradient_energy(outcomes) + _LEAST_WEIGHT) * counted
    return np.stack([_returns(outcomes) * weight, weight, outcomes.mask])


def optimal_token_baseline(outcomes: TokenOutcomes, sums: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Optimal token baseline (arXiv 2602.07078): G_t - B_t, where G_t is the return from the sample's t-th loss token on (step
    rewards and KL penalty included) and B_t = sum(G_t W_t) / sum(W_t) over the group's samples that have such a token. W_t, the
    sum of 1 - 2 p + sum_v p_v^2 up to that token, stands for the squared norm of the gradient; with correction weights each
    term is multiplied by the squared weight. Where only one sample is left, `tail_baseline` decides: B_t is its own return, so
    that the advantage is 0, or 0."""
    weighted, weight, samples = sums
    baseline = np.divide(weighted, weight, out=np.zeros(len(weight)), where=weight > 0)
    if settings.tail_baseline == "zero":
        longest = [
            part.max(initial=0.0) for part in _by_sample(samples, outcomes.lengths)
        ]  # samples at the first position
        baseline[(samples == 1) & (np.repeat(longest, outcomes.lengths) > 1)] = 0.0
    return np.where(outcomes.mask, _returns(outcomes) - baseline, 0.0)


def _returns(outcomes: TokenOutcomes) -> np.ndarray:
    return returns_to_go(
        outcomes.rewards, outcomes.mask, outcomes.lengths, gamma=1.0, token_rewards=outcomes.token_rewards
    )


def _by_sample(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


ADVANTAGES.register("optimal_token_baseline")(
    AdvantageEstimator(
        None,
        ("tail_baseline",),
        of_positions=PositionEstimator(optimal_token_baseline, _terms),
        needs_siblings=True,
    )
)
