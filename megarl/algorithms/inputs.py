"""What a policy loss sees: flat per-token vectors of one micro batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class LossInputs:
    """Vectors of one micro batch, its sequences one after the other: all of shape [T].

    Sequences are whole, also where context parallelism cuts them: every rank of the group sees the same T
    tokens. Only `log_probs` and `entropy` carry
    gradients. Entries where `loss_mask` is 0 hold numbers without meaning.
    """

    log_probs: Tensor  # of the current weights
    loss_mask: Tensor  # 1.0 where the loss counts the token, else 0.0
    loss_weights: Tensor  # what each token weighs in the aggregated loss; 0 where masked
    token_share: Tensor  # loss_mask / masked tokens of the mini batch: its sum over everything is 1
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # before this step's updates (proximal policy)
    rollout_log_probs: Tensor | None = None  # the engine's own
    reference_log_probs: Tensor | None = None
    entropy: Tensor | None = None
