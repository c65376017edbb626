"""A trainer process, the actor's or the critic's: the calls it answers.

Every rank runs the same calls in the same order. What a call computes for the rank's shard (old
log-probs, reference log-probs, values) stays here, beside the micro batches it belongs to, until the update.
"""

from __future__ import annotations

import os
import random
import socket
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from megarl import platform as platforms
from megarl.algorithms.catalogue import import_modules
from megarl.algorithms.correction import Mismatch, weight_totals
from megarl.algorithms.objective import objective, runs_old_log_prob_pass, trainers_policy
from megarl.config.schema import Recipe
from megarl.exchange.session import ExchangeSession, host_id
from megarl.types import DataRef, Metrics, SampleTokens, Shard, ShardSample, fetch


class Worker:
    """One device's share of a model in training, or, `weights_only`, of one that is loaded to be exported. Made inside
    its own process; rank and world size come from the environment."""

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        self.recipe = recipe
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        import_modules(recipe.algorithm)
        self.platform = platforms.select(recipe.cluster.device)
        self.platform.prepare()  # before megatron is imported, below and in the modules that this imports

        import torch

        torch.set_num_threads(recipe.cluster.threads)
        self.platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(
            self.platform.process_group_backend, timeout=timedelta(seconds=recipe.cluster.timeout)
        )
        _seed_everything(recipe.train.seed)

        self.trainer = self._make_trainer(total_optimizer_steps, weights_only)
        self.saves: list[Any] = []  # checkpoint.Save, of the last checkpoint
        self.batches: list[list[Any]] = []  # MicroBatch, by mini batch
        self.members: list[list[list[int]]] = []  # of each micro batch: numbers of its samples in the shard

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> Any:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Where this rank stands in the layout, and what it holds."""
        own = {"host": host_id(), "pid": os.getpid(), "device_name": self.platform.device_name()}
        return {**asdict(self.trainer.coordinates), **own, **self.trainer.describe()}

    def sees(self, path: str) -> tuple[str, bool]:
        """This machine's name, and whether `path` exists on it."""
        return socket.gethostname(), os.path.exists(path)

    # --- one step -------------------------------------------------------------------------------

    def load_shard(self, shard: Shard) -> None:
        """Fetch the vectors of this rank's samples and lay out its micro batches."""
        vectors = fetch(shard.samples)
        self.members = shard.mini_batches
        self.batches = [
            [
                self._micro_batch([(shard.samples[i], vectors[i]) for i in members], loss_tokens)
                for members in mini_batch
            ]
            for mini_batch, loss_tokens in zip(shard.mini_batches, shard.loss_tokens, strict=True)
        ]

    def _micro_batch(self, members: list[tuple[ShardSample, SampleTokens]], loss_tokens: int) -> Any:
        import torch

        from megarl.megatron.batch import MicroBatch
        from megarl.megatron.images import Images

        def join(pieces: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(pieces).astype(np.float32)).to(self.platform.device())

        # A sample of weight 0 (filtered, or filling an empty micro batch) is computed and counts nowhere.
        masks = [vectors.loss_mask * float(sample.loss_weight > 0) for sample, vectors in members]
        return MicroBatch(
            tokens=torch.from_numpy(np.concatenate([vectors.tokens for _, vectors in members]).astype(np.int64)).to(
                self.platform.device()
            ),
            lengths=[len(vectors.tokens) for _, vectors in members],
            counted=[sample.loss_weight > 0 for sample, _ in members],
            vectors={
                "loss_mask": join(masks),
                "loss_weights": join(
                    [mask * sample.loss_weight for mask, (sample, _) in zip(masks, members, strict=True)]
                ),
                "token_share": join([mask / max(loss_tokens, 1) for mask in masks]),
                "advantages": join([np.full(len(vectors.tokens), sample.advantage) for sample, vectors in members]),
                "rollout_log_probs": join([vectors.rollout_log_probs for _, vectors in members]),
            },
            routing=self._routing([vectors for _, vectors in members]),
            images=Images.of([vectors.images for _, vectors in members]),
        )

    def _routing(self, vectors: list[SampleTokens]) -> Any:
        """Where the engine sent the tokens, for `megatron.routing_replay: rollout`."""
        if self.recipe.megatron.routing_replay != "rollout":
            return None
        import torch

        from megarl.megatron.routing_replay import Routing

        experts = [sample.routed_experts for sample in vectors]
        assert all(part is not None for part in experts), "the engine was started without return_routed_experts"
        return Routing(tokens=torch.from_numpy(np.concatenate(experts)))  # type: ignore[arg-type]

    # --- weights --------------------------------------------------------------------------------

    def stage_save(self, directory: str, copy: bool) -> tuple[int, list[str]]:
        """Take down what a checkpoint needs: with `copy` into host memory, so that training may go on at once.

        Returns the bytes that this rank is going to write under `directory`, and its receipts: paths within
        `directory` of files that appear when a part is on the disk.
        """
        save = self.trainer.stage_save(Path(directory), copy=copy)
        self.saves = [save]
        return sum(save.bytes for save in self.saves), [os.path.relpath(save.receipt, directory) for save in self.saves]

    def write_save(self) -> None:
        """Start writing what `stage_save` took down, beside whatever comes next."""
        for save in self.saves:
            save.start()

    def save_done(self) -> bool:
        """Whether it is on the disk. Raises what writing failed of."""
        return all([save.done() for save in self.saves])

    def wait_save(self) -> None:
        """Return once it is on the disk. Raises what writing failed of."""
        for save in self.saves:
            save.wait()

    def load(self, directory: str) -> str | None:
        """Continue from a checkpoint. Returns a notice where the run does not go on to the last bit."""
        return self.trainer.load(Path(directory))

    def save_hf(self, directory: str) -> None:
        self.trainer.save_hf(Path(directory))

    def save_adapter(self, directory: str) -> None:
        self.trainer.save_adapter(Path(directory))

    def compare_with_hf(self, directory: str) -> tuple[int, int]:
        """Hold an exported directory to the weights here; returns how many tensors are equal, and how many untrained."""
        result = self.trainer.compare_with_hf(Path(directory))
        return result.equal, result.untrained

    def offload_optimizer(self) -> None:
        self.trainer.offload_optimizer()

    def offload_weights(self) -> None:
        self.trainer.offload_weights()

    def onload(self) -> None:
        self.trainer.onload()

    def shutdown(self) -> None:
        """The orderly end of a run: leave the process group."""
        import torch

        torch.distributed.destroy_process_group()


class TrainerWorker(Worker):
    """One device's share of the actor."""

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        super().__init__(recipe, total_optimizer_steps, weights_only)
        self.sender: Any = None
        self.mismatch = Mismatch()  # of the step under way
        # Log-probs are taken at the temperature that sampled; demonstrations were not sampled.
        self.temperature = recipe.rollout.temperature if recipe.train.source == "rollout" else 1.0
        if recipe.algorithm.kl_coef and not weights_only:
            self.trainer.keep_reference()

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> Any:
        from megarl.megatron.trainer import PolicyTrainer

        return PolicyTrainer(self.recipe, self.platform, total_optimizer_steps, weights_only=weights_only)

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
        """The gap to the engine as this step's first pass over each sample measured it, on reporting ranks."""
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

    def compute_reference_log_probs(self) -> None:
        flat = [batch for mini_batch in self.batches for batch in mini_batch]
        results = self.trainer.log_probs(flat, temperature=self.temperature, reference=True)
        for batch, (log_probs, _) in zip(flat, results or [], strict=results is not None):
            batch.vectors["reference_log_probs"] = log_probs

    def load_advantages(self, parts: list[tuple[DataRef, list[int]]]) -> None:
        """Take the advantage of each token from where the critic left it.

        Each part holds vectors, one for each of the samples of this rank's shard whose numbers stand beside it.
        Samples that count nowhere are in none.
        """
        import torch

        found = {number: vector for data, numbers in parts for number, vector in zip(numbers, data.get(), strict=True)}
        for batches, mini_batch in zip(self.batches, self.members, strict=True):
            for batch, members in zip(batches, mini_batch, strict=True):
                pieces = [
                    found.get(number, np.zeros(length, dtype=np.float32))
                    for number, length in zip(members, batch.lengths, strict=True)
                ]
                batch.vectors["advantages"] = torch.from_numpy(np.concatenate(pieces)).to(self.platform.device())

    def update_actor(self, correction_scales: list[float] | None = None) -> list[Metrics] | None:
        """One optimizer step a mini batch. Returns each one's metrics, on reporting ranks.

        `correction_scales`: of each mini batch, what `objective` multiplies correction weights by.
        """
        settings, measure = self.recipe.algorithm, not runs_old_log_prob_pass(self.recipe.algorithm)
        metrics = []
        self.mismatch = Mismatch() if measure else self.mismatch
        for number, mini_batch in enumerate(self.batches):
            scale = correction_scales[number] if correction_scales else 1.0
            first = measure and number == 0 and self.recipe.train.source == "rollout"

            def learn(inputs: Any, scale: float = scale, first: bool = first) -> tuple[Any, dict[str, Any]]:
                if first:  # of the others, earlier mini batches have already moved the policy away
                    self.mismatch += Mismatch.of(inputs, trainers_policy(inputs, settings))
                return objective(inputs, settings, scale)

            metrics.append(
                self.trainer.train_step(
                    mini_batch,
                    learn,
                    temperature=self.temperature,
                    with_entropy=self.recipe.train.source == "rollout",
                )
            )
        self.batches = []
        return [step for step in metrics if step is not None] if self.trainer.coordinates.reports else None

    def open_exchange(self, receivers: list[tuple[str, str]]) -> ExchangeSession | None:
        """Rank 0 becomes the sender to `receivers` (name, host id) and returns what they need to connect."""
        if self.rank != 0:
            return None
        from megarl.exchange.sender import WeightSender

        exchange = self.recipe.exchange
        self.sender = WeightSender.open(
            os.environ["MASTER_ADDR"],
            receivers,
            transport=exchange.transport,
            bucket_bytes=exchange.bucket_mb << 20,
            timeout=exchange.timeout,
        )
        return self.sender.session

    def send_weights(self, version: int) -> Any:
        """Export the weights through mbridge (all ranks) and send them (rank 0). Returns rank 0's report."""
        weights = self.trainer.export_weights()
        if self.sender is not None:
            return self.sender.send(version, weights)
        for _ in weights:
            pass
        return None

    def shutdown(self) -> None:
        """Give shared memory back, too."""
        if self.sender is not None:
            self.sender.close()
        super().shutdown()


def _seed_everything(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
