"""Actor process: log-probs, KL to the reference policy, token advantages, policy updates, weights to the engines."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.correction import Mismatch, weight_totals
from megarl.algorithms.inputs import TokenSums
from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.objective import (
    held_out_metrics,
    kl_to_reference,
    needs_teacher,
    objective,
    runs_old_log_prob_pass,
    runs_reference_pass,
    teacher_top_k,
    trainers_policy,
    with_proximal_policy,
    without_rejected,
)
from megarl.recipe.derived.weight_sync_route import weights_directory
from megarl.recipe.schema import Recipe
from megarl.trainer.position_advantages import advantages_by_position
from megarl.trainer.token_recorder import TokenRecorder, TokenVectors, recorded_samples
from megarl.trainer.worker import CAUSES_OF_BROKEN_WEIGHTS, Worker, collect_parts, traced
from megarl.types import DataRef, Metrics, SampleTokens, Shard, ShardSample, TokenScores
from megarl.weight_sync.session import AbortedUpdate, Session, UpdateReport, is_check_due

if TYPE_CHECKING:  # Megatron must not be imported before the platform has prepared it
    from torch import Tensor

    from megarl.algorithms.inputs import LossInputs
    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.trainer import PolicyTrainer
    from megarl.weight_sync.sender import UpdatingRank


class ActorWorker(Worker):
    """One device's share of the actor."""

    trainer: PolicyTrainer

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        super().__init__(recipe, total_optimizer_steps, weights_only)
        self.sender: UpdatingRank | None = None
        self.adapters = False  # sends only adapters, after the base weights with the first version
        self.first_sent: int | None = None  # the first version
        # State of the current step:
        self.mismatch = Mismatch()
        self.numbers: list[int] = []  # index within the batch of each sample of the shard
        self.token_kl: dict[int, np.ndarray] = {}  # by index in the shard; see `compute_kl`
        self.squares: list[Tensor] = []  # per micro batch: sums of squared probabilities [T], if needed
        self.token_advantages: list[np.ndarray] = []  # per micro batch, before whitening
        self.recorder = TokenRecorder(recorded_samples(recipe) if self.trainer.coordinates.reports else 0)
        # Log-probs are computed at the sampling temperature; SFT and DPO rows were not sampled.
        self.temperature = recipe.rollout.temperature if recipe.train.source == "rollout" else 1.0
        if runs_reference_pass(recipe.algorithm) and not weights_only:
            self.trainer.keep_reference()

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> PolicyTrainer:
        from megarl.megatron.trainer import PolicyTrainer

        return PolicyTrainer(self.recipe, self.platform, total_optimizer_steps, weights_only=weights_only)

    def load_shard(self, shard: Shard) -> None:
        super().load_shard(shard)
        self.numbers, self.token_kl = [sample.number for sample in shard.samples], {}
        self.token_advantages, self.squares, self.recorder.vectors = [], [], {}

    def _micro_batch(self, members: list[tuple[ShardSample, SampleTokens]], loss_tokens: int) -> MicroBatch:
        import torch

        batch = super()._micro_batch(members, loss_tokens)
        if self.recipe.algorithm.kl_in_reward:
            chosen = torch.from_numpy(np.concatenate([vectors.loss_mask for _, vectors in members]))
            batch.vectors["chosen"] = chosen.to(self.platform.device())
        if needs_teacher(self.recipe.algorithm):
            self._add_teacher(batch, [vectors.teacher for _, vectors in members])
        return batch

    def _add_teacher(self, batch: MicroBatch, scores: list[TokenScores | None]) -> None:
        """Add the teacher's `scores` of the samples to `batch`."""
        import torch

        from megarl.megatron.batch import Candidates
        from megarl.megatron.heads.output_heads import IMPOSSIBLE

        complete = [score for score in scores if score is not None]
        assert len(complete) == len(scores), "the teacher has not read these samples"
        sampled = torch.from_numpy(np.concatenate([score.log_probs for score in complete]))
        batch.vectors["reference_log_probs"] = sampled.to(self.platform.device())
        if teacher_top_k(self.recipe.algorithm) and self.trainer.coordinates.is_last_stage:
            tokens = np.concatenate([score.top_tokens for score in complete])
            log_probs = np.concatenate([score.top_log_probs for score in complete])
            in_vocabulary = tokens < self.trainer.model.vocab_size  # the teacher's vocabulary may have more padding
            batch.candidates = Candidates(
                torch.from_numpy(np.where(in_vocabulary, tokens, np.int32(-1))),
                torch.from_numpy(np.where(in_vocabulary, log_probs, np.float32(IMPOSSIBLE))),
            )

    @traced("old_log_prob")
    def compute_old_log_probs(self) -> Mismatch | None:
        """Compute log-probs before this step's updates. Returns their mismatch with the engine's, on reporting ranks."""
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        with_squares = ADVANTAGES[self.recipe.algorithm.advantage].of_positions is not None
        compute: Any = self.trainer.log_probs_and_squares if with_squares else self.trainer.log_probs
        results = compute(flat, temperature=self.temperature)
        if results is None:
            return None
        self.mismatch, self.squares = Mismatch(), [squares for _, squares in results if with_squares]
        for batch, (log_probs, _) in zip(flat, results, strict=True):
            batch.vectors["old_log_probs"] = log_probs
            self.mismatch += Mismatch.of(self.trainer.loss_inputs(batch, log_probs), log_probs)
        return self.measured_mismatch()

    def measured_mismatch(self) -> Mismatch | None:
        """Return the step's mismatch of log-probs between trainer and engine, on reporting ranks.

        It is measured on all samples if a pass precedes the updates, else on the first mini batch, before its update.
        """
        return self.mismatch if self.trainer.coordinates.reports else None

    def correction_totals(self) -> np.ndarray | None:
        """Return sum and number of this rank's correction weights per mini batch [mini batches, 2], on reporting ranks.

        `algorithm.correction.normalize` needs them.
        """
        if not self.trainer.coordinates.reports:
            return None
        settings = self.recipe.algorithm.correction

        def totals(batch: MicroBatch) -> np.ndarray:
            old = batch.vectors["old_log_probs"]
            return weight_totals(self.trainer.loss_inputs(batch, old), old, settings)

        return np.stack([np.sum([totals(batch) for batch in mini_batch], axis=0) for mini_batch in self.batches])

    @traced("reference")
    def compute_reference_log_probs(self) -> int:
        """Compute the reference policy's log-probs. Returns the step of its weights; 0: before training."""
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        results = self.trainer.log_probs(flat, temperature=self.temperature, reference=True)
        for batch, (log_probs, _) in zip(flat, results or [], strict=results is not None):
            batch.vectors["reference_log_probs"] = log_probs
        assert self.trainer.reference is not None
        return self.trainer.reference.step

    def refresh_reference(self, step: int) -> None:
        """Make the current policy, after `step`, the reference policy."""
        self.hold(None)
        self.trainer.keep_reference(step)

    def compute_held_out_metrics(self) -> Metrics | None:
        """Return this shard's part of the metrics of all held-out rows, on reporting ranks. Frees the shard."""
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        results = self.trainer.log_probs(flat, temperature=self.temperature)
        self.batches = []
        if results is None or not self.trainer.coordinates.reports:
            return None
        sums: Metrics = {}
        for batch, (log_probs, _) in zip(flat, results, strict=True):
            inputs = self.trainer.loss_inputs(batch, log_probs)
            for name, value in held_out_metrics(inputs, self.recipe.algorithm).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def compute_kl(self) -> dict[int, float] | None:
        """Estimate each token's KL to the reference policy before the updates, for `algorithm.kl_in_reward`.

        The vectors stay here for `collect_kl` and `estimate_advantages`. Returns, on reporting ranks, the sum over each
        sample's chosen tokens, by index in the batch. It includes samples that the loss excludes, because estimators
        compare the other samples of the group with their rewards.
        """
        if not self.trainer.coordinates.is_last_stage:
            return None
        sums = {}
        for batch, members in self._micro_batches():
            inputs = self.trainer.loss_inputs(batch, batch.vectors["old_log_probs"])
            kl = kl_to_reference(inputs, self.recipe.algorithm).double()
            on_host = kl.where(inputs.chosen, kl.new_zeros(())).cpu().numpy()
            for member, sample_kl in zip(members, np.split(on_host, np.cumsum(batch.lengths)[:-1]), strict=True):
                self.token_kl[member] = sample_kl
                sums[self.numbers[member]] = float(sample_kl.sum())
        return sums if self.trainer.coordinates.reports else None

    def collect_kl(self, members: list[list[int]]) -> tuple[None, list[list[np.ndarray]]]:
        """Return the KL vectors (float32) of the samples with the indices `members`, list by list, for the critic.

        Ranks that do not report return empty lists.
        """
        if not self.trainer.coordinates.reports:
            return None, [[] for _ in members]
        return None, [[self.token_kl[member].astype(np.float32) for member in part] for part in members]

    def estimate_advantages(self, kl_weight: float, group_lengths: list[int]) -> Moments | None:
        """Estimate an advantage for each token, before `whiten_advantages`. Returns their moments, on reporting ranks.

        group_lengths: `optimal_baseline.group_lengths` of the batch.
        """
        estimator, moments = ADVANTAGES[self.recipe.algorithm.advantage], Moments()
        self.token_advantages = []
        if not self.trainer.coordinates.is_last_stage:  # other stages compute no loss
            return None
        settings, micro_batches = self.recipe.algorithm, self._micro_batches()
        outcomes = [self._outcomes(batch, members, self.token_kl, kl_weight) for batch, members in micro_batches]
        if estimator.of_tokens is not None:
            self.token_advantages = [estimator.of_tokens(part, settings) for part in outcomes]
        else:
            self.token_advantages = advantages_by_position(
                self.trainer, settings, [batch for batch, _ in micro_batches], outcomes, self.squares, group_lengths
            )
        for part, advantages in zip(outcomes, self.token_advantages, strict=True):
            moments += Moments.of(advantages[part.mask])
        return moments if self.trainer.coordinates.reports else None

    def whiten_advantages(self, whitening: Whitening) -> None:
        if not self.trainer.coordinates.is_last_stage:
            return
        for (batch, _), advantages in zip(self._micro_batches(), self.token_advantages, strict=True):
            self._set_advantages(batch, [whitening(advantages)])

    def set_advantages(self, per_sample: list[float]) -> None:
        """Set the advantage of each token to its sample's. per_sample: by index in the shard."""
        for batch, members in self._micro_batches():
            pieces = [np.full(n, per_sample[member]) for member, n in zip(members, batch.lengths, strict=True)]
            self._set_advantages(batch, pieces)

    def _micro_batches(self) -> list[tuple[MicroBatch, list[int]]]:
        """Return each micro batch of the step with the shard indices of its samples."""
        batches = [batch for mini_batch in self.batches for batch in mini_batch]
        return list(zip(batches, [members for mini_batch in self.members for members in mini_batch], strict=True))

    def _set_advantages(self, batch: MicroBatch, pieces: list[np.ndarray]) -> None:
        import torch

        advantages = torch.from_numpy(np.concatenate(pieces).astype(np.float32))
        batch.vectors["advantages"] = advantages.to(self.platform.device())

    def load_advantages(self, parts: list[tuple[DataRef, list[int]]]) -> None:
        """Fetch each token's advantage from the critic's processes.

        A part refers to the vectors of some samples and lists their indices in this rank's shard. Samples without loss
        weight are in no part; their advantages are 0.
        """
        vectors = collect_parts(parts)
        for batch, members in self._micro_batches():
            self._set_advantages(
                batch, [vectors.get(k, np.zeros(n)) for k, n in zip(members, batch.lengths, strict=True)]
            )

    @traced("update_actor")
    def update_actor(
        self, kl_weight: float | None = None, correction_scales: list[float] | None = None
    ) -> list[Metrics] | None:
        """Make one optimizer step per mini batch and epoch. Returns the metrics of each, on reporting ranks.

        kl_weight: weight of the KL loss; None: the recipe's. correction_scales: factor of the correction weights of each
        mini batch.
        """
        settings, measure = self.recipe.algorithm, not runs_old_log_prob_pass(self.recipe.algorithm)
        metrics, sampled = [], self.recipe.train.source == "rollout"
        self.mismatch = Mismatch() if measure else self.mismatch
        for update in range(self.recipe.actor.epochs * len(self.batches)):
            number = update % len(self.batches)
            mini_batch = self.batches[number]
            if LOSSES[settings.loss].selection is not None:
                self._select(update, mini_batch)
            scale = correction_scales[number] if correction_scales else 1.0
            first = measure and update == 0 and sampled

            def learn(
                inputs: LossInputs, scale: float = scale, first: bool = first
            ) -> tuple[Tensor, dict[str, Tensor]]:
                if first:  # later updates see a policy that the earlier ones have changed
                    self.mismatch += Mismatch.of(inputs, trainers_policy(inputs, settings))
                return objective(inputs, settings, correction_scale=scale, kl_weight=kl_weight)

            observe = self.recorder.observer(mini_batch, self.members[number], self.numbers)
            how: dict[str, Any] = {"temperature": self.temperature, "with_entropy": sampled}
            metrics.append(self.trainer.train_step(mini_batch, learn, observe, **how))
        self.batches, self.token_kl, self.token_advantages, self.squares = [], {}, [], []
        return [step for step in metrics if step is not None] if self.trainer.coordinates.reports else None

    def take_recorded_tokens(self) -> TokenVectors:
        """Return the values of each recorded token of the last update, on reporting ranks."""
        return self.recorder.take()

    def _select(self, update: int, mini_batch: list[MicroBatch]) -> None:
        """Select the tokens of a whole mini batch that the loss treats separately (`Selection`).

        update: the number of the optimizer step within the controller step.
        """
        import torch

        settings = self.recipe.algorithm
        selection = LOSSES[settings.loss].selection
        assert selection is not None
        # Before the first update, the old log-probs are the current policy's.
        if update == 0 and runs_old_log_prob_pass(settings):
            log_probs = [batch.vectors.get("old_log_probs") for batch in mini_batch]
        else:
            results = self.trainer.log_probs(mini_batch, temperature=self.temperature, record=False)
            log_probs = [batch_log_probs for batch_log_probs, _ in results or []]
        if not self.trainer.coordinates.is_last_stage:
            return
        inputs = [
            without_rejected(with_proximal_policy(self.trainer.loss_inputs(batch, batch_log_probs), settings), settings)
            for batch, batch_log_probs in zip(mini_batch, log_probs, strict=True)
        ]
        sums = sum((TokenSums.of(batch_inputs) for batch_inputs in inputs), TokenSums())
        sums = sum(self.trainer.gather(sums), TokenSums())
        draws = self._random_numbers(update)
        scores = [
            selection.scores(batch_inputs, sums, draw, settings)
            for batch_inputs, draw in zip(inputs, draws, strict=True)
        ]
        candidates = self.trainer.gather(selection.candidates(scores, sums, settings))
        limit = selection.limit(candidates, sums, settings)
        for batch, batch_scores in zip(mini_batch, scores, strict=True):
            batch.vectors["selected"] = torch.from_numpy(batch_scores >= limit)

    def _random_numbers(self, update: int) -> list[np.ndarray]:
        """Draw a random number for each token of the mini batch of optimizer step `update`; returned per micro batch. The
        numbers of a sample do not depend on the parallel layout."""
        seed, step, number = self.recipe.train.seed, self.trainer.step, update % len(self.batches)

        def draw(member: int, length: int) -> np.ndarray:
            return np.random.default_rng([seed, step, self.numbers[member]]).random(length)

        return [
            np.concatenate([draw(member, n) for member, n in zip(members, batch.lengths, strict=True)])
            for batch, members in zip(self.batches[number], self.members[number], strict=True)
        ]

    def open_weight_sync(self, receivers: list[tuple[str, str]], route: str) -> Session | str | None:
        """Open a sender to `receivers` (name, host id) and close an earlier one. Rank 0 sends for the routes "full" and
        "adapters", every rank for "sharded". Returns the session on rank 0, or the reason (str) against "sharded"."""
        weight_sync, host = self.recipe.weight_sync, os.environ["MASTER_ADDR"]
        self.adapters, self.first_sent = route == "adapters", None
        self._close_sender()
        if route == "sharded":
            from megarl.megatron.weight_sender import open_sender

            opened = open_sender(self.trainer.model, weight_sync, receivers, host, self.platform.name)
            if isinstance(opened, str):
                return opened
            self.sender = opened
            return opened.session if self.rank == 0 else None
        if self.rank == 0:
            from megarl.weight_sync.full.sender import FullSender

            self.sender = sender = FullSender.open(
                host,
                receivers,
                transport=weight_sync.transport,
                bucket_bytes=weight_sync.bucket_mb << 20,
                timeout=weight_sync.timeout,
                heartbeat_timeout=weight_sync.silence,
                directory=str(weights_directory(self.recipe)),
                adapter_alpha=self.recipe.lora.alpha if self.adapters else None,
            )
            return sender.session
        from megarl.weight_sync.sender import ExportingRank

        self.sender = ExportingRank()
        return None

    def send_weights(self, version: int) -> UpdateReport | AbortedUpdate | None:
        """Send the weights to the engines. Returns this rank's report; None if it sends nothing. Raises BrokenWeights."""
        from megarl.weight_sync.sender import send_or_abort

        assert self.sender is not None, "open_weight_sync comes first"
        self.check_weights(f"the engines do not receive version {version}. {CAUSES_OF_BROKEN_WEIGHTS}")
        export = functools.partial(self._export, version)
        return send_or_abort(self.sender, version, export, survive_abort=self.recipe.rollout.min_engines is not None)

    def _export(self, version: int) -> Any:
        """Export what the engines load: all weights, gathered on all ranks, or adapters."""
        if not self.adapters:
            return self.trainer.export_weights()
        with_base = self.first_sent is None
        self.first_sent = version if self.first_sent is None else self.first_sent
        due = is_check_due(version, self.first_sent, self.recipe.weight_sync.check_every)
        return self.trainer.export_adapters(with_base=with_base, check=due)

    def shutdown(self) -> None:
        """Also free shared memory."""
        self._close_sender()
        super().shutdown()

    def _close_sender(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None
