"""The critic's side of PPO: generalised advantage estimation, whitening, and the value loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


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


@dataclass(frozen=True)
class Moments:
    """What is known of many numbers that lie in many places: enough for mean and variance of all of them."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (x - mean)^2
    least: float = np.inf
    largest: float = -np.inf

    @classmethod
    def of(cls, numbers: np.ndarray, counts: np.ndarray | None = None) -> Moments:
        """Of `numbers`, each of which occurs once, or as often as `counts` says (which may be 0)."""
        if counts is not None:
            numbers, counts = numbers[counts > 0], counts[counts > 0]
        if not numbers.size:
            return cls()
        exact = numbers.astype(np.float64)
        mean = float(np.average(exact, weights=counts))
        squares = float(((exact - mean) ** 2 * (1 if counts is None else counts)).sum())
        count = exact.size if counts is None else int(counts.sum())
        return cls(count, mean, squares, float(exact.min()), float(exact.max()))

    def __add__(self, other: Moments) -> Moments:
        """Of both (Chan et al., 1979): no large sums that cancel."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
            float(np.minimum(self.least, other.least)),  # keep a NaN, which min() and max() may drop
            float(np.maximum(self.largest, other.largest)),
        )

    def metrics(self, name: str, whitening: Whitening) -> dict[str, float]:
        """Mean, maximum and minimum after `whitening`; empty where there is no number."""
        if not self.count:
            return {}
        values = {"mean": self.mean, "max": self.largest, "min": self.least}
        return {f"{name}/{what}": float(whitening(value)) for what, value in values.items()}

    @property
    def variance(self) -> float:
        """With Bessel's correction, as verl whitens; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True)
class ValueMoments:
    """Of the masked tokens of a batch, or of a part of it; parts add up."""

    values: Moments = Moments()
    returns: Moments = Moments()
    advantages: Moments = Moments()  # returns - values, before whitening

    def __add__(self, other: ValueMoments) -> ValueMoments:
        return ValueMoments(
            self.values + other.values, self.returns + other.returns, self.advantages + other.advantages
        )


@dataclass(frozen=True)
class Whitening:
    """x -> (x - mean) * scale: the same for the advantages of a whole batch, wherever they lie."""

    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def by(cls, moments: Moments) -> Whitening:
        """To mean 0 and variance 1. Advantages that are all the same become 0."""
        return cls(moments.mean, 1.0 / np.sqrt(moments.variance + 1e-8))

    def __call__(self, numbers: Any) -> Any:
        """Of an array or one number."""
        return (numbers - self.mean) * self.scale


@dataclass
class ValueInputs:
    """What the value loss sees: flat per-token vectors of one micro batch, all [T]. Only `values` carries gradients."""

    values: Tensor  # of the current weights
    old_values: Tensor  # before this step's updates
    returns: Tensor
    loss_mask: Tensor  # 1.0 where the loss counts the token, else 0.0
    loss_weights: Tensor  # what each token weighs in the aggregated loss; 0 where masked
    token_share: Tensor  # loss_mask / masked tokens of the mini batch: its sum over everything is 1


def value_loss(inputs: ValueInputs, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of each token [T], and per-token metrics.

    With `clip`, PPO's clipped form (as in OpenAI baselines' ppo2): the larger of the errors of V and of
    clamp(V, old V - clip, old V + clip), so that a step beyond `clip` gains nothing.
    """
    loss = 0.5 * (inputs.values - inputs.returns).square()
    if clip is None:
        return loss, {}
    near = inputs.values.clamp(inputs.old_values - clip, inputs.old_values + clip)  # the value itself, where it is near
    clipped = 0.5 * (near - inputs.returns).square()
    return loss.maximum(clipped), {"critic/vf_clipfrac": (clipped > loss).float()}


def value_objective(inputs: ValueInputs, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """What one micro batch adds to the mini batch's value loss, and to each metric; see `losses.objective`."""
    token_loss, metrics = value_loss(inputs, clip)
    masked = inputs.loss_mask > 0

    def total(values: Tensor, weights: Tensor) -> Tensor:
        return (values.where(masked, values.new_zeros(())) * weights).sum()

    loss = total(token_loss, inputs.loss_weights)
    return loss, {
        **{name: total(values, inputs.token_share) for name, values in metrics.items()},
        "critic/vf_loss": loss.detach(),
    }
