"""Handle on the actor's processes of a training API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.algorithms.datum_losses import DatumLoss
from megarl.batching.datums import AdamParams, Datum, DatumScores, DatumShard, lay_out
from megarl.batching.limits import token_limit
from megarl.trainer.datums.worker import DatumWorker
from megarl.trainer.group import ActorGroup


class DatumGroup(ActorGroup):
    """The actor's processes (`DatumWorker`)."""

    def score(self, data: Sequence[Datum], loss: DatumLoss) -> DatumScores:
        """Compute the loss of `data` without gradients."""
        return _merged(self._scatter(DatumWorker.score_data, self._shards_of(data), loss))

    def add_gradient(self, data: Sequence[Datum], loss: DatumLoss) -> DatumScores:
        """Compute the loss of `data`, and add its gradient to those since the last update."""
        return _merged(self._scatter(DatumWorker.add_gradient, self._shards_of(data), loss))

    def update_weights(self, params: AdamParams) -> tuple[float, bool]:
        """Make one update from the gradients. Returns their norm, and whether the weights have changed."""
        return self._call(DatumWorker.update_weights, params)[0]

    def forget_gradients(self) -> None:
        """Forget the gradients since the last update."""
        self._call(DatumWorker.forget_gradients)

    def load_state(self, folder: Path, *, with_optimizer: bool) -> list[str | None]:
        """Load the weights of a checkpoint, and Adam's state or none. Returns each rank's notice."""
        return self._call(DatumWorker.load_state, str(folder), with_optimizer)

    def _shards_of(self, data: Sequence[Datum]) -> list[DatumShard]:
        return lay_out(data, self.data_parallel, token_limit(self.recipe), self.micro_batches_multiple_of)


def _merged(answers: Sequence[DatumScores | None]) -> DatumScores:
    """Return the scores of all data-parallel ranks together."""
    reports = [answer for answer in answers if answer is not None]
    log_probs = {number: vector for report in reports for number, vector in report.log_probs.items()}
    return DatumScores(sum(report.loss for report in reports), log_probs)
