"""Inputs of advantage estimators and policy losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """Input of an advantage estimator: the samples of one batch, all vectors [B] in the same order.

    Example: two samples of one prompt, the first correct: ``Outcomes(rewards=array([1.0, 0.0]), groups=array([7, 7]),
    loss_tokens=array([120, 80]))``.
    """

    rewards: np.ndarray  # float64: total reward of the sample, step rewards included
    groups: np.ndarray  # integers: samples of one prompt share a number
    loss_tokens: np.ndarray  # integers: number of loss tokens (the policy chose them and the loss counts them)
    greedy_rewards: np.ndarray | None = None  # float64: of a greedy sample of the same prompt, if requested
    # Steps of the batch, sample by sample: float64 [S], their rewards; int64 [S], the sample's index in the vectors above.
    step_rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    step_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64 [B]: the parts in `algorithm.reward_parts`


@dataclass(frozen=True)
class TokenOutcomes:
    """The concatenated samples of one micro batch: B samples with T tokens in total."""

    rewards: np.ndarray  # float64 [B]: outcomes, without step rewards
    mask: np.ndarray  # bool [T]: loss tokens
    lengths: Sequence[int]  # [B]: they sum to T
    step_rewards: np.ndarray | None = None  # float64 [T]: at the token that ends each step; None: no sample has steps
    penalties: np.ndarray | None = None  # float64 [T]: -weight x KL, added to rewards; None: no KL in the reward
    groups: np.ndarray | None = None  # int64 [B]: index of each sample's group within the batch
    # For estimators with `of_positions`: the policy before the step's updates.
    log_probs: np.ndarray | None = None  # float64 [T]
    squares: np.ndarray | None = None  # float64 [T]: sum of squared probabilities over the vocabulary
    weights: np.ndarray | None = None  # float64 [T]: correction weights in the loss, 0 for rejected tokens; None: all 1

    @property
    def token_rewards(self) -> np.ndarray | None:
        """Return step rewards + penalties [T]; None if there are neither."""
        return sum_of(self.step_rewards, self.penalties)


def sum_of(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the sum of two optional vectors; None if both are None."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


@dataclass
class LossInputs:
    """Per-token vectors [T] of one micro batch, its sequences concatenated (top-k tensors: [T, K]).

    Sequences are complete, also under context parallelism: every rank of the group has the same T tokens. Only
    `log_probs`, `entropy` and `top_log_probs` carry gradients. Loss tokens have `loss_mask` 1. The others are excluded
    (prompts, tool output, filtered samples): their entries in the other vectors are undefined.
    """

    log_probs: Tensor  # of the current weights
    loss_mask: Tensor  # 1.0 for a loss token, 0.0 for an excluded token
    loss_weights: Tensor  # weight of each token in the aggregated loss; 0 for excluded tokens
    token_share: Tensor  # loss_mask / number of loss tokens of the mini batch: sums to 1 over the mini batch
    lengths: list[int]  # [S]: sequence lengths; they sum to T
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # before this step's updates (proximal policy)
    rollout_log_probs: Tensor | None = None  # as the engine returned them
    versions: Tensor | None = None  # of the weights that sampled each token; None: not recorded
    reference_log_probs: Tensor | None = None  # of the initial policy, or a teacher
    reference_top_log_probs: Tensor | None = None  # [T, K]: of the teacher's K most likely tokens at each position
    top_log_probs: Tensor | None = None  # [T, K]: of the current weights, for the same tokens
    entropy: Tensor | None = None
    chosen: Tensor | None = None  # bool: tokens that the policy chose, filtered samples included; for kl_in_reward
    selected: Tensor | None = None  # bool: by score over the whole mini batch, for losses with `scores`
    groups: Tensor | None = None  # index of each token's group, for losses with `whole_groups`
    accepted: Tensor | None = None  # `loss_mask`, 0.0 for tokens that a correction rejects; None: no token is rejected

    def zero_excluded(self, values: Tensor) -> Tensor:
        """Return `values` [T] with 0 for excluded tokens, even if their value is inf or nan."""
        return kept(values, self.loss_mask)

    def total(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of `values` [T] times `weights` [T] over the loss tokens."""
        return self.zero_excluded(values).mul_(weights).sum()

    def as_in_loss(self, values: Tensor) -> Tensor:
        """Convert a metric [T] so that its mean over loss tokens becomes a mean with the loss's weights."""
        share = self.token_share.where(self.loss_mask > 0, self.token_share.new_ones(()))
        return self.zero_excluded(values * self.loss_weights / share)

    @property
    def counted(self) -> Tensor:
        """Return `loss_mask` with 0.0 for the tokens that a correction rejects: [T]."""
        return self.loss_mask if self.accepted is None else self.accepted

    def accepting(self, accepted: Tensor) -> LossInputs:
        """Return inputs in which only tokens with `accepted` [T] above 0 get a gradient and count in sums of sequences."""
        constant = {}
        for name in ("log_probs", "entropy", "top_log_probs"):
            values = getattr(self, name)
            if values is not None:
                where = (accepted > 0).view(-1, *[1] * (values.dim() - 1))
                constant[name] = values.where(where, values.detach())
        return replace(self, accepted=accepted, **constant)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sum `values` [T] over each sequence's accepted loss tokens: [S]."""
        import torch

        return torch.stack([part.sum() for part in kept(values, self.counted).split(self.lengths)])

    def sequence_means(self, values: Tensor) -> Tensor:
        """Average `values` [T] over each sequence's accepted loss tokens: [S]; 0 for a sequence without any."""
        counts = self.sequence_sums(self.loss_mask)
        return self.sequence_sums(values) / counts.to(values.dtype).clamp(min=1.0)

    def group_means(self, per_sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Average values of sequences [S] over the counted sequences of each one's group, which must be complete: the means
        [S], and the number of counted sequences [S]. A sequence without accepted loss tokens is not counted."""
        import torch

        assert self.groups is not None
        starts = torch.tensor([0, *self.lengths[:-1]], device=per_sequence.device).cumsum(0)
        same = (self.groups[starts][:, None] == self.groups[starts]).to(per_sequence.dtype)  # [S, S]
        same = same * (self.sequence_sums(self.loss_mask) > 0)
        counts = same.sum(1)
        return (same @ per_sequence) / counts.clamp(min=1.0), counts

    def on_tokens(self, per_sequence: Tensor) -> Tensor:
        """Broadcast values of sequences [S] to their tokens [T]; 0 for excluded tokens."""
        import torch

        expanded = [part.expand(n) for part, n in zip(per_sequence, self.lengths, strict=True)]
        return self.zero_excluded(torch.cat(expanded))


def advantages_of(inputs: LossInputs) -> Tensor:
    """Return the advantages [T], which must be set."""
    assert inputs.advantages is not None
    return inputs.advantages


def kept(values: Tensor, where: Tensor) -> Tensor:
    """Return `values` [T] where `where` [T] is above 0, else 0, even for inf and nan; the same for the gradient.

    Equals `values.where(where > 0, 0)`, through the kernel of ReLU's gradient. On a CPU it takes a fourth of the time, or
    a twentieth if positive and other entries of `where` alternate.
    """
    import torch

    return torch.ops.aten.threshold_backward(values, where, 0)


def with_slope(value: Tensor, slope: Tensor, variable: Tensor) -> Tensor:
    """Return `value` [T] with the derivative `slope` [T] with respect to `variable` [T].

    For piecewise functions: torch's gradients of maximum, clamp and where cost several times the forward.
    """
    return value.addcmul(slope, variable - variable.detach())  # + 0


@dataclass(frozen=True)
class TokenSums:
    """Sums over the loss tokens of a part of the mini batch, for losses that select tokens by score; parts add up."""

    tokens: float = 0.0
    log_probs: float = 0.0
    advantages: float = 0.0

    @classmethod
    def of(cls, inputs: LossInputs) -> TokenSums:
        def total(values: Tensor) -> float:
            return float(kept(values.detach(), inputs.counted).double().sum().item())

        return cls(total(inputs.counted), total(inputs.log_probs), total(advantages_of(inputs)))

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            self.tokens + other.tokens, self.log_probs + other.log_probs, self.advantages + other.advantages
        )

    def count(self, share: float) -> int:
        """Return the number of tokens in a fraction `share` of all: at least 1, and rounded down as by the authors."""
        return max(1, int(share * self.tokens))
