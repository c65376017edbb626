"""Actor process of a training API: passes over a caller's data, and updates with the caller's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.datum_losses import DatumLoss
from megarl.batching.datums import AdamParams, Datum, DatumScores, DatumShard
from megarl.batching.packing import Slot
from megarl.trainer.actor import ActorWorker

if TYPE_CHECKING:  # Megatron must not be imported before the platform has prepared it
    import torch

    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.datum_trainer import DatumTrainer


class DatumWorker(ActorWorker):
    """One device's share of the actor. A datum of N tokens is a sequence of N + 1: the model also reads its last target, so that
    every target has an index, as all tokens have (the index law)."""

    trainer: DatumTrainer

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> DatumTrainer:
        from megarl.megatron.datum_trainer import DatumTrainer

        return DatumTrainer(self.recipe, self.platform, total_optimizer_steps, weights_only=weights_only)

    def score_data(self, shard: DatumShard, loss: DatumLoss) -> DatumScores | None:
        """Compute the loss of this rank's data without gradients. Returns them on reporting ranks."""
        return self._scores(shard, self.trainer.scores(self._batches_of(shard, loss), loss))

    def add_gradient(self, shard: DatumShard, loss: DatumLoss) -> DatumScores | None:
        """Compute the loss of this rank's data, and add its gradient to those since the last update."""
        return self._scores(shard, self.trainer.add_gradient(self._batches_of(shard, loss), loss))

    def update_weights(self, params: AdamParams) -> tuple[float, bool]:
        """Make one update. Returns the gradient norm, and whether the weights have changed: see `DatumTrainer.update`."""
        return self.trainer.update(params)

    def forget_gradients(self) -> None:
        self.trainer.forget_gradients()

    def load_state(self, directory: str, with_optimizer: bool) -> str | None:
        """Load a checkpoint. `with_optimizer`: False forgets Adam's state. Returns the notice of `load`."""
        notice = self.load(directory)
        self.trainer.forget_gradients()
        if not with_optimizer:
            self.trainer.forget_updates()
        return notice

    def _batches_of(self, shard: DatumShard, loss: DatumLoss) -> list[MicroBatch]:
        return [
            self._batch_of([(shard.data[slot.sample], slot) for slot in part], loss) for part in shard.micro_batches
        ]

    def _batch_of(self, members: list[tuple[Datum, Slot]], loss: DatumLoss) -> MicroBatch:
        import torch

        from megarl.megatron.batch import MicroBatch

        device = self.platform.device()

        def joined(pieces: list[np.ndarray], dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(pieces).astype(dtype)).to(device)

        data = [datum for datum, _ in members]
        return MicroBatch(
            tokens=joined([piece for datum in data for piece in (datum.tokens, datum.targets[-1:])], np.int64),
            lengths=[len(datum.tokens) + 1 for datum in data],
            counted=[not slot.filler for _, slot in members],
            vectors={
                name: joined([piece for datum in data for piece in (_ZERO, datum.vectors[name])], np.float32)
                for name in loss.inputs
            },
            predicted=joined([piece for datum in data for piece in (_ZERO, datum.targets)], np.int64),
        )

    def _scores(self, shard: DatumShard, results: list[tuple[torch.Tensor, torch.Tensor]] | None) -> DatumScores | None:
        if results is None or not self.trainer.coordinates.reports:
            return None
        log_probs: dict[int, np.ndarray] = {}
        for part, (_, flat) in zip(shard.micro_batches, results, strict=True):
            lengths = [len(shard.data[slot.sample].tokens) + 1 for slot in part]
            for slot, vector in zip(part, np.split(flat.float().cpu().numpy(), np.cumsum(lengths)[:-1]), strict=True):
                if not slot.filler:
                    log_probs[shard.numbers[slot.sample]] = vector[1:].copy()
        return DatumScores(float(sum(float(value) for value, _ in results)), log_probs)


_ZERO = np.zeros(1)
"""Entry of a sequence's first token, which nothing predicts."""
