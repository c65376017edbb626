"""Trainer of a training API: gradients accumulate over calls, and each update has its own settings of Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megarl.algorithms.datum_losses import DatumLoss
from megarl.batching.datums import AdamParams
from megarl.megatron.batch import MicroBatch
from megarl.megatron.checkpoint.shards import forget_updates
from megarl.megatron.heads.output_heads import PolicyHead
from megarl.megatron.optimizer import guarded_step
from megarl.megatron.trainer import PolicyTrainer

Scores = tuple[torch.Tensor, torch.Tensor]
"""Loss of a micro batch, a scalar, and log-probs of its targets [T] at token index."""


class DatumTrainer(PolicyTrainer):
    """`add_gradient` any number of times, then `update`. Every method is collective."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes = 0  # gradients in the buffers: calls of `add_gradient` since the last update

    def scores(self, micro_batches: list[MicroBatch], loss: DatumLoss) -> list[Scores] | None:
        """Compute the loss without gradients, per micro batch; None except on the last pipeline stage."""
        return self._forward(micro_batches, self._loss_of(loss), self._head())

    def add_gradient(self, micro_batches: list[MicroBatch], loss: DatumLoss) -> list[Scores] | None:
        """Compute the loss, and add its gradient to those since the last update. Returns `scores`.

        Megatron sums gradients over ranks at the end of each pass, in the buffers. So earlier passes are kept aside meanwhile.
        """
        earlier = [gradient.clone() for gradient in self._gradients()] if self.passes else []
        results = self.accumulate(micro_batches, self._loss_of(loss), self._head())
        for gradient, kept in zip(self._gradients(), earlier, strict=bool(earlier)):
            gradient.add_(kept)
        self.passes += 1
        return results

    def update(self, params: AdamParams) -> tuple[float, bool]:
        """Update the weights with Adam from the gradients since the last update, and forget these gradients.

        Returns the gradient norm before clipping, and whether the weights have changed: a norm that is not finite changes nothing.
        """
        assert self.passes, "add_gradient comes first"
        for group in self.optimizer.param_groups:
            decay = params.weight_decay * group["wd_mult"]  # 0 for norms and biases
            group.update(betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=decay)
        self.step += 1
        self.passes = 0
        device = self.platform.device()
        done = guarded_step(self.optimizer, lr=params.learning_rate, clip_grad=params.grad_clip_norm, device=device)
        return done.norm, done.updated

    def forget_gradients(self) -> None:
        """Forget the gradients since the last update."""
        self.passes = 0

    def forget_updates(self) -> None:
        """Bring Adam to its state before the first update; the weights stay."""
        forget_updates(self.optimizer)
        self.passes = 0

    def _loss_of(self, loss: DatumLoss) -> Any:
        def compute(batch: MicroBatch, log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Scores]:
            assert batch.counted is not None
            if not any(batch.counted):  # a filler: all ranks run the same number of micro batches
                return (log_probs * 0).sum(), (log_probs.new_zeros(()), log_probs.detach())
            value = loss(log_probs, self._on_device(batch.vectors), batch.lengths)
            return value, (value.detach(), log_probs.detach())

        return compute

    def _head(self) -> PolicyHead:
        return self.head(1.0, False, with_candidates=False)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self.model.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data
