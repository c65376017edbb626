"""What advantages and policy losses see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """What an advantage estimator sees: the samples of one batch, each vector [B] and in the same order.

    Example: two samples of one prompt, the first right: ``Outcomes(rewards=array([1.0, 0.0]), groups=array([7, 7]),
    loss_tokens=array([120, 80]))``.
    """

    rewards: np.ndarray  # float64: all that a sample earned, steps within it included
    groups: np.ndarray  # integers: siblings, the samples of one prompt, share one
    loss_tokens: np.ndarray  # integers: tokens that the policy chose and the loss counts; 0 for a filtered sample
    greedy_rewards: np.ndarray | None = None  # float64: of a greedy sample of the same prompt, where one was asked for
    # Steps of the batch, sample by sample: float64 [S], what each earned; int64 [S], its sample's place in the vectors above.
    step_rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    step_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass
class LossInputs:
    """Vectors of one micro batch, its sequences one after the other: all of shape [T], but for those of K tokens a place.

    Sequences are whole, also where context parallelism cuts them: every rank of the group sees the same T tokens. Only
    `log_probs`, `entropy` and `top_log_probs` carry gradients. Entries where `loss_mask` is 0 hold numbers without meaning.
    """

    log_probs: Tensor  # of the current weights
    loss_mask: Tensor  # 1.0 where the loss counts the token, else 0.0
    loss_weights: Tensor  # what each token weighs in the aggregated loss; 0 where masked
    token_share: Tensor  # loss_mask / masked tokens of the mini batch: its sum over everything is 1
    lengths: list[int]  # [S]: of the sequences; they sum to T
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # before this step's updates (proximal policy)
    rollout_log_probs: Tensor | None = None  # the engine's own
    reference_log_probs: Tensor | None = None  # of the starting policy, or a teacher
    reference_top_log_probs: Tensor | None = (
        None  # [T, K]: of the K tokens that a teacher finds likeliest in each place
    )
    top_log_probs: Tensor | None = None  # [T, K]: of the current weights, for the same tokens
    entropy: Tensor | None = None
    chosen: Tensor | None = (
        None  # bool: by the policy, in samples that the loss leaves out, too; for the KL in the reward
    )
    selected: Tensor | None = None  # bool: chosen over the whole mini batch, for losses that have `scores`

    def masked(self, values: Tensor) -> Tensor:
        """`values` [T], and 0 where the loss does not count the token, whatever stood there (0 x inf would be nan)."""
        return kept(values, self.loss_mask)

    def total(self, values: Tensor, weights: Tensor) -> Tensor:
        """Sum of `values` [T] times `weights` [T] over the tokens that the loss counts."""
        return self.masked(values).mul_(weights).sum()

    def as_in_loss(self, values: Tensor) -> Tensor:
        """A metric [T] that is to be a mean with the loss's own weights, where metrics are means over masked tokens."""
        share = self.token_share.where(self.loss_mask > 0, self.token_share.new_ones(()))
        return self.masked(values * self.loss_weights / share)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence's masked tokens: [T] -> [S]."""
        import torch

        return torch.stack([own.sum() for own in self.masked(values).split(self.lengths)])

    def sequence_means(self, values: Tensor) -> Tensor:
        """Mean over each sequence's masked tokens: [T] -> [S]; 0 for a sequence without any."""
        counts = self.sequence_sums(self.loss_mask)
        return self.sequence_sums(values) / counts.to(values.dtype).clamp(min=1.0)

    def on_tokens(self, per_sequence: Tensor) -> Tensor:
        """Give each token that counts what its sequence has: [S] -> [T], 0 where masked."""
        import torch

        return self.masked(torch.cat([own.expand(n) for own, n in zip(per_sequence, self.lengths, strict=True)]))


def kept(values: Tensor, where: Tensor) -> Tensor:
    """`values` [T] where `where` [T] is above 0, else 0, whatever stood there; and so with their gradient.

    What `values.where(where > 0, 0)` gives, by the kernel of ReLU's gradient: on a CPU a fourth of the time, and a twentieth
    where tokens of both kinds alternate.
    """
    import torch

    return torch.ops.aten.threshold_backward(values, where, 0)


def with_slope(value: Tensor, slope: Tensor, variable: Tensor) -> Tensor:
    """`value` [T], whose derivative with respect to each token's `variable` [T] is `slope` [T].

    For functions with cases: torch's own gradients of maximum, clamp and where cost several times what the functions do.
    """
    return value.addcmul(slope, variable - variable.detach())  # + 0
