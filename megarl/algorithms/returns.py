"""What tokens earn from their place on: returns to go, and generalised advantage estimation. Pure, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """Generalised advantage estimation (arXiv 1506.02438) over sequences that lie one after the other.

    rewards [B]: the outcome of each sequence, earned at its last masked token. values [T]: of the state in which
    token t was chosen. mask [T]: the tokens that the policy chose. lengths [B] sum to T. token_rewards [T]: what
    each token earns besides, as rewards of steps.
    Returns advantages and returns (advantages + values), float64 [T], 0 where masked out.

    Over the masked tokens of a sequence, in order: delta_t = r_t + gamma V_next - V_t and
    A_t = delta_t + gamma lam A_next; what lies between two of them (a tool's answer) takes no part and no time.
    After the last one both V and A are 0, also where the response was cut off at the length limit.
    """
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    for number, chosen in _sequences(mask, lengths):
        own = values[chosen].astype(np.float64)
        deltas = gamma * np.append(own[1:], 0.0) - own
        deltas[-1] += rewards[number]
        if token_rewards is not None:
            deltas += token_rewards[chosen]
        advantages[chosen] = _discounted_sums(deltas, gamma * lam)
        returns[chosen] = advantages[chosen] + own
    return advantages, returns


def returns_to_go(
    rewards: np.ndarray,
    mask: np.ndarray,
    lengths: Sequence[int],
    *,
    gamma: float,
    token_rewards: np.ndarray | None = None,
) -> np.ndarray:
    """What each chosen token and those after it earn, sum over j >= t of gamma^(j - t) r_j: float64 [T], 0 where
    masked out. Arguments as for `gae`; j counts chosen tokens alone."""
    returns = np.zeros(len(mask))
    for number, chosen in _sequences(mask, lengths):
        earned = token_rewards[chosen].astype(np.float64) if token_rewards is not None else np.zeros(_count(chosen))
        earned[-1] += rewards[number]
        returns[chosen] = _discounted_sums(earned, gamma)
    return returns


Chosen = slice | np.ndarray
"""A sequence's masked tokens, as an index into the vectors: where they are neighbours, a slice, which copies nothing."""


def _sequences(mask: np.ndarray, lengths: Sequence[int]) -> Iterator[tuple[int, Chosen]]:
    """Each sequence that has any, with its masked tokens."""
    start = 0
    for number, length in enumerate(lengths):
        places = np.flatnonzero(mask[start : start + length])
        if len(places):
            first, end = start + int(places[0]), start + int(places[-1]) + 1
            yield number, slice(first, end) if end - first == len(places) else start + places
        start += length


def _count(chosen: Chosen) -> int:
    return chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)


_BLOCK = 512  # tokens that are summed at once, at most
_SMALLEST = 1e-4  # power of the discount within a block: its inverse is what rounding grows by


def _discounted_sums(x: np.ndarray, c: float) -> np.ndarray:
    """y[k] = x[k] + c y[k + 1]; [n] -> [n], for c in [0, 1].

    In blocks from the end, within which y is a running sum: with m counted from the block's end, y[m] = c^m times the sum
    over i <= m of x[i] c^-i; and c^(m + 1) times the y that follows the block comes on top. A block is short enough that
    c^m stays well above 0.
    """
    if c == 1.0:
        return np.cumsum(x[::-1])[::-1]
    size = 1 if c < _SMALLEST else min(_BLOCK, len(x), 1 + int(np.log(_SMALLEST) / np.log(c)))
    count = -(-len(x) // size)
    blocks = np.zeros((count, size))
    blocks.reshape(-1)[: len(x)] = x[::-1]
    powers = c ** np.arange(size)
    blocks /= powers
    np.cumsum(blocks, axis=1, out=blocks)
    blocks *= powers
    following, across = np.zeros(count), c**size
    last = blocks[:, -1].tolist()
    for block in range(1, count):
        following[block] = last[block - 1] + across * following[block - 1]
    blocks += np.multiply.outer(following, c * powers)
    return blocks.reshape(-1)[: len(x)][::-1]
