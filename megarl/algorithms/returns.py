"""What tokens earn from their place on: returns to go, and generalised advantage estimation. Pure, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

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
    each token earns besides.
    Returns advantages and returns (advantages + values), float64 [T], 0 where masked out.

    Over the masked tokens of a sequence, in order: delta_t = r_t + gamma V_next - V_t and
    A_t = delta_t + gamma lam A_next; what lies between two of them (a tool's answer) takes no part and no time.
    After the last one both V and A are 0, also where the response was cut off at the length limit.
    """
    chosen, sequence, last = _chosen(mask, lengths)
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    if not len(chosen):
        return advantages, returns
    own = np.asarray(values, dtype=np.float64)[chosen]
    following = np.where(last, 0.0, np.append(own[1:], 0.0))
    deltas = _earned(rewards, token_rewards, chosen, sequence, last) + gamma * following - own
    advantages[chosen] = _discounted_sums(deltas, sequence, gamma * lam)
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
    chosen, sequence, last = _chosen(mask, lengths)
    returns = np.zeros(len(mask))
    if len(chosen):
        returns[chosen] = _discounted_sums(_earned(rewards, token_rewards, chosen, sequence, last), sequence, gamma)
    return returns


def _chosen(mask: np.ndarray, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the n masked tokens: index, number of the sequence, and whether it is the sequence's last; all [n]."""
    chosen = np.flatnonzero(mask)
    sequence = np.repeat(np.arange(len(lengths)), lengths)[chosen]
    return chosen, sequence, np.append(sequence[1:] != sequence[:-1], len(chosen) > 0)[: len(chosen)]


def _earned(
    rewards: np.ndarray, token_rewards: np.ndarray | None, chosen: np.ndarray, sequence: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """What each chosen token earns [n]: the outcome at a sequence's last one, and its own."""
    earned = np.where(last, np.asarray(rewards, dtype=np.float64)[sequence], 0.0)
    return earned if token_rewards is None else earned + np.asarray(token_rewards, dtype=np.float64)[chosen]


def _discounted_sums(deltas: np.ndarray, sequence: np.ndarray, discount: float) -> np.ndarray:
    """Sum over j >= i of discount^(j - i) deltas[j] within i's sequence; [n] -> [n].

    By doubling: once every entry holds the sum over the next `step` entries, adding the one `step` further
    on makes it 2 x `step`. As many passes as the longest sequence has binary digits.
    """
    sums, step, factor = deltas.copy(), 1, discount
    longest = int(np.bincount(sequence).max())
    while step < longest and factor != 0.0:
        same = sequence[step:] == sequence[:-step]
        sums[:-step] += np.where(same, factor * sums[step:], 0.0)
        step, factor = 2 * step, factor * factor
    return sums
