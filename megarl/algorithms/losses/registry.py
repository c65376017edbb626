"""Registry of policy losses.

A loss takes `LossInputs` and the recipe's `AlgorithmConfig` and returns the loss of each token [T] and metrics: per-token
vectors [T], reported as means over the loss tokens. It declares the passes it needs, so that unused passes do not run,
and the settings it reads, so that a recipe with an unused setting is refused. `objective` weights and sums the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.algorithms.inputs import LossInputs, TokenSums
from megarl.recipe.algorithm import check_settings
from megarl.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig

Metrics = dict[str, "Tensor"]
TokenLoss = Callable[[LossInputs, "AlgorithmConfig"], "tuple[Tensor, Metrics]"]
Scores = Callable[[LossInputs, TokenSums, "np.ndarray", "AlgorithmConfig"], "np.ndarray"]


@dataclass(frozen=True)
class Selection:
    """Selects tokens of a whole mini batch that a loss treats separately: those with a score of at least `limit`.

    Each rank scores its tokens and sends `candidates`. `limit` takes the candidates of all ranks, so the selection does not
    depend on how the mini batch is split.
    """

    scores: Scores  # of a micro batch's tokens [T], with random numbers [T] to draw by; -inf: never selected
    candidates: Callable[[Sequence[np.ndarray], TokenSums, AlgorithmConfig], np.ndarray]  # of a rank's scores
    limit: Callable[[Sequence[np.ndarray], TokenSums, AlgorithmConfig], float]  # inf: no token is selected


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss."""

    function: TokenLoss
    needs_old_log_probs: bool  # it compares the policy with the proximal policy
    settings: tuple[str, ...]  # the fields of `AlgorithmConfig` that it reads
    selection: Selection | None = None  # tokens of the mini batch that it treats separately
    source: str = "rollout"  # the `train.source` that it learns from
    needs_advantages: bool = True
    needs_reference: bool = False  # the reference policy's log-probs, even if `kl_coef` is 0
    needs_top: bool = False  # log-probs of the teacher's most likely tokens
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # of settings that a recipe leaves open, where they differ
    whole_groups: bool = False  # it compares samples of a group, which are then adjacent in one micro batch


LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def policy_loss(
    name: str, *, needs_old_log_probs: bool, settings: tuple[str, ...] = (), **more: Any
) -> Callable[[TokenLoss], TokenLoss]:
    """Register a loss under `name`, its value in a recipe's `algorithm.loss`. Further arguments: fields of `PolicyLoss`."""

    check_settings((*settings, *more.get("defaults", {})))

    def add(function: TokenLoss) -> TokenLoss:
        LOSSES.register(name)(PolicyLoss(function, needs_old_log_probs, settings, **more))
        return function

    return add
