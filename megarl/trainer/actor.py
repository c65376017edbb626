"""An actor process: log-probs, KL to the reference policy, advantages of tokens, policy updates, weights to the engines."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.correction import Mismatch, weight_totals
from megarl.algorithms.covariance import threshold
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
)
from megarl.algorithms.token_advantages import TokenOutcomes
from megarl.algorithms.token_sums import TokenSums
from megarl.recipe.exchange import weights_directory
from megarl.recipe.schema import Recipe
from megarl.trainer.worker import Worker, collect_parts, traced
from megarl.types import DataRef, Metrics, SampleTokens, Shard, ShardSample, TokenScores
from megarl.weight_sync.session import Session, is_check_due


class ActorWorker(Worker):
    """One device's share of the actor."""

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        super().__init__(recipe, total_optimizer_steps, weights_only)
        self.sender: Any = None
        self.planned = False  # whether it sends what engines need, and nothing else
        self.adapters = False  # whether it sends adapters, and the weights beside them once
        self.first_sent: int | None = None  # the version with which these weights went
        # Of the step under way:
        self.mismatch = Mismatch()
        self.numbers: list[int] = []  # of the shard's samples, within the batch
        self.token_kl: dict[int, np.ndarray] = {}  # by number in the shard: see `compute_kl`
        self.token_advantages: list[np.ndarray] = []  # of each micro batch, not whitened yet
        # Log-probs are taken at the temperature that sampled; demonstrations were not sampled.
        self.temperature = recipe.rollout.temperature if recipe.train.source == "rollout" else 1.0
        if runs_reference_pass(recipe.algorithm) and not weights_only:
            self.trainer.keep_reference()

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> Any:
        from megarl.megatron.trainer import PolicyTrainer

        return PolicyTrainer(self.recipe, self.platform, total_optimizer_steps, weights_only=weights_only)

    def load_shard(self, shard: Shard) -> None:
        super().load_shard(shard)
        self.numbers, self.token_kl, self.token_advantages = [sample.number for sample in shard.samples], {}, []

    def _micro_batch(self, members: list[tuple[ShardSample, SampleTokens]], loss_tokens: int) -> Any:
        import torch

        batch = super()._micro_batch(members, loss_tokens)
        if self.recipe.algorithm.kl_in_reward:
            chosen = torch.from_numpy(np.concatenate([vectors.loss_mask for _, vectors in members]))
            batch.vectors["chosen"] = chosen.to(self.platform.device())
        if needs_teacher(self.recipe.algorithm):
            self._add_teacher(batch, [vectors.teacher for _, vectors in members])
        return batch

    def _add_teacher(self, batch: Any, scores: list[TokenScores | None]) -> None:
        """What a teacher said of the samples of `batch`."""
        import torch

        from megarl.megatron.batch import Candidates
        from megarl.megatron.output_heads import IMPOSSIBLE

        told = [score for score in scores if score is not None]
        assert len(told) == len(scores), "the teacher has not read these samples"
        of_tokens = torch.from_numpy(np.concatenate([score.log_probs for score in told]))
        batch.vectors["reference_log_probs"] = of_tokens.to(self.platform.device())
        if teacher_top_k(self.recipe.algorithm) and self.trainer.coordinates.is_last_stage:
            tokens = np.concatenate([score.top_tokens for score in told])
            log_probs = np.concatenate([score.top_log_probs for score in told])
            known = tokens < self.trainer.model.vocab_size  # a teacher's vocabulary may be padded further
            batch.candidates = Candidates(
                torch.from_numpy(np.where(known, tokens, np.int32(-1))),
                torch.from_numpy(np.where(known, log_probs, np.float32(IMPOSSIBLE))),
            )

    @traced("old_log_prob")
    def compute_old_log_probs(self) -> Mismatch | None:
        """Log-probs before this step's updates. Returns their gap to the engine's, on reporting ranks."""
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        results = self.trainer.log_probs(flat, temperature=self.temperature)
        if results is None:
            return None
        self.mismatch = Mismatch()
        for batch, (log_probs, _) in zip(flat, results, strict=True):
            batch.vectors["old_log_probs"] = log_probs
            self.mismatch += Mismatch.of(self.trainer.loss_inputs(batch, log_probs), log_probs)
        return self.measured_mismatch()

    def measured_mismatch(self) -> Mismatch | None:
        """The gap to the engine of this step: of all samples where a pass came before the updates, else of the first mini
        batch's, whose update is the first; on reporting ranks."""
        return self.mismatch if self.trainer.coordinates.reports else None

    def correction_totals(self) -> np.ndarray | None:
        """For each mini batch, the sum and number of this rank's correction weights [mini batches, 2], which
        `algorithm.correction.normalize` needs; on reporting ranks."""
        if not self.trainer.coordinates.reports:
            return None
        settings = self.recipe.algorithm.correction

        def of(batch: Any) -> np.ndarray:
            old = batch.vectors["old_log_probs"]
            return weight_totals(self.trainer.loss_inputs(batch, old), old, settings)

        return np.stack([np.sum([of(batch) for batch in mini_batch], axis=0) for mini_batch in self.batches])

    @traced("reference")
    def compute_reference_log_probs(self) -> None:
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        results = self.trainer.log_probs(flat, temperature=self.temperature, reference=True)
        for batch, (log_probs, _) in zip(flat, results or [], strict=results is not None):
            batch.vectors["reference_log_probs"] = log_probs

    def compute_held_out_metrics(self) -> Metrics | None:
        """What this shard adds to the metrics of all held-out rows, on reporting ranks. Nothing is learned, and nothing
        of the shard stays here."""
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
        """Estimate each token's KL to the reference policy, before the step's updates, for `algorithm.kl_in_reward`.

        It stays here, for `collect_kl` and `estimate_advantages`. Returns its sum over the tokens that the policy chose in
        each sample, by number in the batch; on reporting ranks. A sample that the loss leaves out is among them: its
        siblings are compared with what it earned.
        """
        if not self.trainer.coordinates.is_last_stage:
            return None
        sums = {}
        for batch, members in self._micro_batches():
            inputs = self.trainer.loss_inputs(batch, batch.vectors["old_log_probs"])
            kl = kl_to_reference(inputs, self.recipe.algorithm).double()
            on_host = kl.where(inputs.chosen, kl.new_zeros(())).cpu().numpy()
            for number, own in zip(members, np.split(on_host, np.cumsum(batch.lengths)[:-1]), strict=True):
                self.token_kl[number] = own
                sums[self.numbers[number]] = float(own.sum())
        return sums if self.trainer.coordinates.reports else None

    def collect_kl(self, wanted: list[list[int]]) -> tuple[None, list[list[np.ndarray]]]:
        """What `compute_kl` found for the samples with the `wanted` numbers, list by list: for the critic. On
        reporting ranks; elsewhere empty lists."""
        if not self.trainer.coordinates.reports:
            return None, [[] for _ in wanted]
        return None, [[self.token_kl[number].astype(np.float32) for number in numbers] for numbers in wanted]

    def estimate_advantages(self, kl_weight: float) -> Moments | None:
        """An advantage for each token by the recipe's estimator, for `whiten_advantages` to end with. Returns what is
        known of them together, on reporting ranks."""
        estimate, moments = ADVANTAGES[self.recipe.algorithm.advantage].of_tokens, Moments()
        self.token_advantages = []
        if not self.trainer.coordinates.is_last_stage:  # where no loss is computed
            return None
        for batch, members in self._micro_batches():
            mask = batch.vectors["loss_mask"].cpu().numpy() > 0
            outcomes = TokenOutcomes(
                rewards=np.array([self.rewards[number] for number in members]),
                step_rewards=self._step_rewards(members, batch.lengths, mask),
                penalties=self._penalties(members, batch.lengths, self.token_kl, kl_weight),
                mask=mask,
                lengths=batch.lengths,
            )
            self.token_advantages.append(estimate(outcomes, self.recipe.algorithm))
            moments += Moments.of(self.token_advantages[-1][mask])
        return moments if self.trainer.coordinates.reports else None

    def whiten_advantages(self, whitening: Whitening) -> None:
        if not self.trainer.coordinates.is_last_stage:
            return
        for (batch, _), advantages in zip(self._micro_batches(), self.token_advantages, strict=True):
            self._set_advantages(batch, [whitening(advantages)])

    def set_advantages(self, per_sample: list[float]) -> None:
        """Give each token of the shard's samples its sample's advantage, anew."""
        for batch, members in self._micro_batches():
            pieces = [np.full(n, per_sample[number]) for number, n in zip(members, batch.lengths, strict=True)]
            self._set_advantages(batch, pieces)

    def _micro_batches(self) -> list[tuple[Any, list[int]]]:
        """Each micro batch of the step, with the numbers of its samples in the shard."""
        batches = [batch for mini_batch in self.batches for batch in mini_batch]
        return list(zip(batches, [members for mini_batch in self.members for members in mini_batch], strict=True))

    def _set_advantages(self, batch: Any, pieces: list[np.ndarray]) -> None:
        import torch

        advantages = torch.from_numpy(np.concatenate(pieces).astype(np.float32))
        batch.vectors["advantages"] = advantages.to(self.platform.device())

    def load_advantages(self, parts: list[tuple[DataRef, list[int]]]) -> None:
        """Take the advantage of each token from where the critic left it.

        Each part holds vectors, one for each of the samples of this rank's shard whose numbers stand beside it.
        Samples that count nowhere are in none.
        """
        found = collect_parts(parts)
        for batch, members in self._micro_batches():
            self._set_advantages(
                batch, [found.get(k, np.zeros(n)) for k, n in zip(members, batch.lengths, strict=True)]
            )

    @traced("update_actor")
    def update_actor(
        self, kl_weight: float | None = None, correction_scales: list[float] | None = None
    ) -> list[Metrics] | None:
        """One optimizer step a mini batch. Returns each one's metrics, on reporting ranks.

        `kl_weight`: of the KL loss; None: the recipe's. `correction_scales`: of each mini batch, what `objective`
        multiplies correction weights by.
        """
        settings, measure = self.recipe.algorithm, not runs_old_log_prob_pass(self.recipe.algorithm)
        metrics = []
        self.mismatch = Mismatch() if measure else self.mismatch
        for number, mini_batch in enumerate(self.batches):
            if LOSSES[settings.loss].scores is not None:
                self._select(number, mini_batch)
            scale = correction_scales[number] if correction_scales else 1.0
            first = measure and number == 0 and self.recipe.train.source == "rollout"

            def learn(inputs: Any, scale: float = scale, first: bool = first) -> tuple[Any, dict[str, Any]]:
                if first:  # of the others, earlier mini batches have already moved the policy away
                    self.mismatch += Mismatch.of(inputs, trainers_policy(inputs, settings))
                return objective(inputs, settings, correction_scale=scale, kl_weight=kl_weight)

            metrics.append(
                self.trainer.train_step(
                    mini_batch,
                    learn,
                    temperature=self.temperature,
                    with_entropy=self.recipe.train.source == "rollout",
                )
            )
        self.batches, self.token_kl, self.token_advantages = [], {}, []
        return [step for step in metrics if step is not None] if self.trainer.coordinates.reports else None

    def _select(self, number: int, mini_batch: list[Any]) -> None:
        """Mark the tokens that the loss treats in a way of their own, over the whole mini batch; see covariance.py."""
        import torch

        settings = self.recipe.algorithm
        scores_of = LOSSES[settings.loss].scores
        assert scores_of is not None
        # Before the first update the policy is still the one of the pass before it.
        if number == 0 and runs_old_log_prob_pass(settings):
            log_probs = [batch.vectors.get("old_log_probs") for batch in mini_batch]
        else:
            results = self.trainer.log_probs(mini_batch, temperature=self.temperature, record=False)
            log_probs = [own for own, _ in results or []]
        if not self.trainer.coordinates.is_last_stage:
            return
        inputs = [
            with_proximal_policy(self.trainer.loss_inputs(batch, own), settings)
            for batch, own in zip(mini_batch, log_probs, strict=True)
        ]
        sums = sum((TokenSums.of(one) for one in inputs), TokenSums())
        sums = sum(self.trainer.gather(sums), TokenSums())
        lots = self._lots(number)
        scores = [scores_of(one, sums, lot, settings) for one, lot in zip(inputs, lots, strict=True)]
        count = sums.count(settings.cov_share)
        highest = np.sort(np.concatenate(scores))[-count:]
        limit = threshold(self.trainer.gather(highest), count)
        for batch, own in zip(mini_batch, scores, strict=True):
            batch.vectors["selected"] = torch.from_numpy(own >= limit)

    def _lots(self, number: int) -> list[np.ndarray]:
        """A random number for each token of mini batch `number`, by micro batch: a sample's are the same wherever it is."""
        seed, step = self.recipe.train.seed, self.trainer.step

        def draw(member: int, length: int) -> np.ndarray:
            return np.random.default_rng([seed, step, self.numbers[member]]).random(length)

        return [
            np.concatenate([draw(member, n) for member, n in zip(members, batch.lengths, strict=True)])
            for batch, members in zip(self.batches[number], self.members[number], strict=True)
        ]

    def open_exchange(self, receivers: list[tuple[str, str]], route: str) -> Session | str | None:
        """Become a sender to `receivers` (name, host id), in place of what this was before: rank 0 alone (`route` "export",
        or "adapters"), or every rank ("planned"). Returns, on rank 0, what receivers need to connect; or why nothing can be
        planned."""
        exchange, host = self.recipe.exchange, os.environ["MASTER_ADDR"]
        self.planned, self.adapters, self.first_sent = route == "planned", route == "adapters", None
        self._close_sender()
        if self.planned:
            from megarl.megatron.weight_sender import open_sender

            opened = open_sender(self.trainer.model, exchange, receivers, host, self.platform.name)
            if isinstance(opened, str):
                return opened
            self.sender = opened
        elif self.rank == 0:
            from megarl.weight_sync.full.sender import FullSender

            self.sender = FullSender.open(
                host,
                receivers,
                transport=exchange.transport,
                bucket_bytes=exchange.bucket_mb << 20,
                timeout=exchange.timeout,
                directory=str(weights_directory(self.recipe)),
                adapter_alpha=self.recipe.lora.alpha if self.adapters else None,
            )
        return self.sender.session if self.rank == 0 else None

    def send_weights(self, version: int) -> Any:
        """Send the weights to the engines. Returns the report of what this rank sent, None where it sent nothing."""
        self.trainer.finish_param_gather()
        if self.planned:
            return self.sender.send(version, self.trainer.export_weights)
        if self.adapters:
            with_base = self.first_sent is None
            self.first_sent = version if self.first_sent is None else self.first_sent
            check = is_check_due(version, self.first_sent, self.recipe.exchange.check_every)
            weights = self.trainer.export_adapters(with_base=with_base, check=check)
        else:
            weights = self.trainer.export_weights()  # through mbridge, on all ranks
        if self.sender is not None:
            return self.sender.send(version, weights)
        for _ in weights:
            pass
        return None

    def shutdown(self) -> None:
        """Give shared memory back, too."""
        self._close_sender()
        super().shutdown()

    def _close_sender(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None
