"""What tokens earn from their place on: returns to go, and generalised advantage estimation. Pure, without a loop over tokens."""

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
    """Generalised advantage estimation (arXiv 1506.02438) over sequences that lie one after the other.

    rewards [B]: the outcome of each sequence, earned at its last masked token. values [T]: of the state in which
    token t was chosen. mask [T]: the tokens that the policy chose. lengths [B] sum to T. token_rewards [T]: what
    each token earns besides, as rewards of steps.
    Returns advantages and returns (advantages + values), float64 [T], 0 where masked out.

    Over the masked tokens of a sequence, in order: delta_t = r_t + gamma V_next - V_t and
    A_t = delta_t + gamma lam A_next; what lies between two of them (a tool's answer) takes no part and no time.
    After the last one both V and A are 0, also where the response was cut off at the length limit. For the return
    G = A + V that is G_t = r_t + gamma (1 - lam) V_next + gamma lam G_next, which is what is summed.
    """
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    for number, chosen in _sequences(mask, lengths):
        own = values[chosen].astype(np.float64)
        earned = _earned(rewards[number], chosen, token_rewards)
        earned[:-1] += gamma * (1.0 - lam) * own[1:]
        gained = _discounted_sums(earned, gamma * lam)
        returns[chosen] = gained
        advantages[chosen] = gained - own
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
        returns[chosen] = _discounted_sums(_earned(rewards[number], chosen, token_rewards), gamma)
    return returns


Chosen = slice | np.ndarray
"""A sequence's masked tokens, as an index into the vectors: where they are neighbours, a slice, which copies nothing."""


def _sequences(mask: np.ndarray, lengths: Sequence[int]) -> Iterator[tuple[int, Chosen]]:
    """Each sequence that has any, with its masked tokens."""
    start = 0
    for number, length in enumerate(lengths):
        own = mask[start : start + length]
        count = np.count_nonzero(own)
        if count:
            first = start + int(own.argmax())
            neighbours = bool(own[first - start : first - start + count].all())
            yield number, slice(first, first + count) if neighbours else start + np.flatnonzero(own)
        start += length


def _earned(reward: float, chosen: Chosen, token_rewards: np.ndarray | None) -> np.ndarray:
    """What each of a sequence's chosen tokens earns, the outcome with the last of them: float64."""
    if token_rewards is not None:
        earned = token_rewards[chosen].astype(np.float64)
    else:
        earned = np.zeros(chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen))
    earned[-1] += reward
    return earned


_BLOCK = 16  # tokens: more multiply more, fewer leave more blocks to go through


def _discounted_sums(x: np.ndarray, c: float) -> np.ndarray:
    """y[k] = x[k] + c y[k + 1]; [n] -> [n], for c in [0, 1].

    A scan by blocks. Within one, y is a triangle of powers of c times x. What y is at each block's start follows from
    these starts alone, by the same recursion with c^block; it is all that the block before has to know of later ones.
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
    """c^(i - k) where i >= k, else 0: [block, block]."""
    later = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    return np.where(later >= 0, c ** np.maximum(later, 0.0), 0.0)
