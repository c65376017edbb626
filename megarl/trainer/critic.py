"""Critic process: values, token advantages, value updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.returns import gae
from megarl.algorithms.values import ValueMoments, value_objective
from megarl.recipe.schema import Recipe
from megarl.trainer.worker import Worker, collect_parts
from megarl.types import DataRef, Metrics, Shard

if TYPE_CHECKING:  # Megatron must not be imported before the platform has prepared it
    from torch import Tensor

    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.critic import CriticTrainer


class CriticWorker(Worker):
    """One rank of the critic. `recipe`: the critic's view of the recipe; see recipe/derived/critic_view.py."""

    trainer: CriticTrainer

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        super().__init__(recipe, total_optimizer_steps, weights_only)
        self.advantages: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by shard index: advantages, loss mask

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> CriticTrainer:
        from megarl.megatron.critic import CriticTrainer

        return CriticTrainer(self.recipe, self.platform, total_optimizer_steps, weights_only=weights_only)

    def load_shard(self, shard: Shard) -> None:
        super().load_shard(shard)
        self.advantages = {}

    def compute_values(self, kl: list[tuple[DataRef, list[int]]], kl_weight: float) -> ValueMoments | None:
        """Compute values before this step's updates, and from them advantages and returns, which stay here.

        kl: location of the KL vectors. `kl_weight` times the KL is subtracted from token rewards.
        Returns the moments of values, returns and advantages, on reporting ranks.
        """
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        members = [numbers for mini_batch in self.members for numbers in mini_batch]
        results = self.trainer.values(flat)
        if results is None:
            return None
        moments, penalties = ValueMoments(), collect_parts(kl)
        for batch, values, numbers in zip(flat, results, members, strict=True):
            moments += self._estimate(batch, values, numbers, penalties, kl_weight)
        return moments if self.trainer.coordinates.reports else None

    def _estimate(
        self, batch: MicroBatch, values: Tensor, numbers: list[int], kl: dict[int, np.ndarray], kl_weight: float
    ) -> ValueMoments:
        """Compute advantages and returns of one micro batch on the host, in float64. Returns their moments."""
        import torch

        settings, on_host = self.recipe.algorithm, values.cpu().numpy()
        outcomes = self._outcomes(batch, numbers, kl, kl_weight)
        mask, discounts = outcomes.mask, {"gamma": settings.gamma, "lam": settings.lam}
        advantages, returns = gae(
            outcomes.rewards, on_host, mask, batch.lengths, **discounts, token_rewards=outcomes.token_rewards
        )
        batch.vectors["old_values"] = values
        batch.vectors["returns"] = torch.from_numpy(returns.astype(np.float32))
        cuts = np.cumsum(batch.lengths)[:-1]
        for number, *vectors in zip(numbers, np.split(advantages, cuts), np.split(mask, cuts), strict=True):
            self.advantages[number] = (vectors[0], vectors[1])
        return ValueMoments(*(Moments.of(vector[mask]) for vector in (on_host, returns, advantages)))

    def collect_advantages(self, whitening: Whitening, members: list[list[int]]) -> tuple[None, list[list[np.ndarray]]]:
        """Return the whitened advantages (float32) of the samples with the indices `members`, list by list, for the actor.

        Ranks that do not report return empty lists.
        """
        if not self.trainer.coordinates.reports:
            return None, [[] for _ in members]

        def whiten(member: int) -> np.ndarray:
            advantages, mask = self.advantages[member]
            return np.where(mask, whitening(advantages), 0.0).astype(np.float32)

        return None, [[whiten(member) for member in part] for part in members]

    def update_critic(self) -> list[Metrics] | None:
        """Make one optimizer step per mini batch and epoch. Returns the metrics of each, on reporting ranks."""
        clip = self.recipe.critic.value_clip
        metrics = [
            self.trainer.train_step(mini_batch, lambda inputs: value_objective(inputs, clip))
            for _ in range(self.recipe.actor.epochs)
            for mini_batch in self.batches
        ]
        self.batches, self.advantages = [], {}
        return [step for step in metrics if step is not None] if self.trainer.coordinates.reports else None
