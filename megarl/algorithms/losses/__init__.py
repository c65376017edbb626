"""Policy losses, one file per kind. Names that a user's loss needs can be imported from here."""

from megarl.algorithms.losses.registry import LOSSES, Metrics, PolicyLoss, policy_loss
from megarl.algorithms.losses.surrogate import clipped_surrogate, log_ratio

__all__ = ["LOSSES", "Metrics", "PolicyLoss", "clipped_surrogate", "log_ratio", "policy_loss"]
