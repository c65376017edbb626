"""Returns-to-go and generalized advantage estimation, without a loop over tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    lengths: Sequence[int],
    *,
    gamma: float,
    lam: float,
    token_rewards: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation (arXiv 1506.02438) over concatenated sequences.

    rewards [B]: outcome of each sequence, received at its last loss token. values [T]: of the state in which token t was
    chosen. mask [T]: true for loss tokens. lengths [B] sum to T. token_rewards [T]: further rewards of each token, such
    as step rewards. Returns advantages and returns (advantages + values), float64 [T], 0 for excluded tokens.

    Over the loss tokens of a sequence, in order: delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next.
    Excluded tokens in between (tool output) are skipped and not discounted. After the last loss token both V and A are 0,
    also if the response was cut at the length limit. The return G = A + V then satisfies
    G_t = r_t + gamma (1 - lam) V_next + gamma lam G_next, which is the recursion computed here.
    """
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    for number, index in _sequences(mask, lengths):
        sequence_values = values[index].astype(np.float64)
        sequence_rewards = _token_rewards(rewards[number], index, token_rewards)
        sequence_rewards[:-1] += gamma * (1.0 - lam) * sequence_values[1:]
        sequence_returns = _discounted_sums(sequence_rewards, gamma * lam)
        returns[index] = sequence_returns
        advantages[index] = sequence_returns - sequence_values
    return advantages, returns


def returns_to_go(
    rewards: np.ndarray,
    mask: np.ndarray,
    lengths: Sequence[int],
    *,
    gamma: float,
    token_rewards: np.ndarray | None = None,
) -> np.ndarray:
    """Return the discounted return of each loss token, sum over j >= t of gamma^(j - t) r_j: float64 [T].

    0 for excluded tokens; j counts loss tokens only. Arguments as for `gae`.
    """
    returns = np.zeros(len(mask))
    for number, index in _sequences(mask, lengths):
        returns[index] = _discounted_sums(_token_rewards(rewards[number], index, token_rewards), gamma)
    return returns


TokenIndex = slice | np.ndarray
"""Index of a sequence's loss tokens: a slice if they are contiguous (no copy), else an array."""


def _sequences(mask: np.ndarray, lengths: Sequence[int]) -> Iterator[tuple[int, TokenIndex]]:
    """Yield (sequence number, index of its loss tokens) for each sequence with loss tokens."""
    start = 0
    for number, length in enumerate(lengths):
        sequence_mask = mask[start : start + length]
        count = np.count_nonzero(sequence_mask)
        if count:
            first = start + int(sequence_mask.argmax())
            contiguous = bool(sequence_mask[first - start : first - start + count].all())
            yield number, slice(first, first + count) if contiguous else start + np.flatnonzero(sequence_mask)
        start += length


def _token_rewards(reward: float, index: TokenIndex, token_rewards: np.ndarray | None) -> np.ndarray:
    """Return the reward of each loss token of a sequence, with the outcome at the last one: float64."""
    if token_rewards is not None:
        total = token_rewards[index].astype(np.float64)
    else:
        total = np.zeros(index.stop - index.start if isinstance(index, slice) else len(index))
    total[-1] += reward
    return total


_BLOCK = 16  # tokens: larger blocks cost more multiplications, smaller blocks a deeper recursion


def _discounted_sums(x: np.ndarray, c: float) -> np.ndarray:
    """Return y[k] = x[k] + c y[k + 1]; [n] -> [n], for c in [0, 1].

    A blocked scan. If nothing followed a block, its y would be x times a triangular matrix of powers of c. The values of
    y at the block starts satisfy the same recursion with factor c^16 and are computed first; adding c times the next
    block's start to a block's last x then accounts for all later blocks.
    """
    blocks = np.zeros((-(-len(x) // _BLOCK), _BLOCK))
    blocks.reshape(-1)[: len(x)] = x
    triangle = _powers(c)
    if len(blocks) > 1:
        starts = _discounted_sums(blocks @ triangle[:, 0], c**_BLOCK)
        blocks[:-1, -1] += c * starts[1:]
    return (blocks @ triangle).reshape(-1)[: len(x)]


@lru_cache(maxsize=64)
def _powers(c: float) -> np.ndarray:
    """Return c^(i - k) for i >= k, else 0: [block, block]."""
    later = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    return np.where(later >= 0, c ** np.maximum(later, 0.0), 0.0)
