"""Typed handles on the trainer processes: one method for each call that the controller makes.

A handle passes the worker's method itself, not its name: mypy compares the arguments with the worker's signature, and
"jump to definition" leads from the controller's line to the code that runs in the process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from megarl.algorithms.correction import correction_scales, total_mismatch
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.optimal_baseline import group_lengths
from megarl.algorithms.spikes import GradNorms
from megarl.algorithms.values import ValueMoments, value_metrics
from megarl.batching.flops import ModelFlops
from megarl.batching.plan import StepPlan, plan_step, routes
from megarl.cluster.base import WorkerGroup
from megarl.platform.load import MachineLoad
from megarl.recipe.schema import Recipe
from megarl.trainer.actor import ActorWorker
from megarl.trainer.critic import CriticWorker
from megarl.trainer.token_recorder import TokenVectors
from megarl.trainer.worker import Worker
from megarl.types import DataRef, Group, InlineData, Metrics, Shard
from megarl.weight_sync.session import AbortedUpdate, Session, UpdateReport, WeightSyncError

P = ParamSpec("P")
R = TypeVar("R")

VectorPart = tuple[DataRef, list[int]]
"""Vectors of some samples, and the indices of these samples in the shard that receives them."""


def adapter_folder(folder: Path) -> Path:
    """Return the folder for the adapters of a model that is exported to `folder`."""
    return folder.absolute().with_name(f"{folder.name}_adapter")


class TrainerGroup:
    """The processes of one model in training. All ranks run every call.

    workers: the processes. recipe: the recipe, or the critic's view of it. model_flops: used to balance micro batches by
    FLOPs; None: balance them by tokens.
    """

    def __init__(self, workers: WorkerGroup, recipe: Recipe, model_flops: ModelFlops | None = None) -> None:
        self.workers, self.recipe, self.model_flops = workers, recipe, model_flops
        self.ranks: list[dict[str, Any]] = []  # description of each rank, from `describe`
        self.outlived_at: int | None = None  # the step after which processes of an earlier controller hold the weights

    # --- layout ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.workers.size

    def describe(self) -> list[dict[str, Any]]:
        """Read each rank's coordinates, device and kernels. Plans and calls with shards need the coordinates."""
        self.ranks = self._call(Worker.describe)
        return self.ranks

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        size: int = self.ranks[0]["dp_size"]
        return size

    @property
    def micro_batches_multiple_of(self) -> int:
        """Required divisor of each rank's number of micro batches: interleaved pipeline schedules need such a multiple."""
        megatron = self.recipe.megatron
        return megatron.pipeline_parallel if megatron.virtual_pipeline else 1

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """Lay out a batch over the data-parallel ranks."""
        return plan_step(groups, self.recipe, self.data_parallel, self.micro_batches_multiple_of, self.model_flops)

    # --- calls ----------------------------------------------------------------------------------

    def load_shards(self, shards: Sequence[Shard]) -> None:
        """Load into each rank the shard of its data-parallel rank. The ranks themselves fetch the token vectors."""
        self._scatter(Worker.load_shard, self._gather_vectors(shards))

    def _gather_vectors(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Let one rank of each data-parallel rank fetch the vectors of its shard, and return the shards with references to these.

        The other ranks then fetch one object with the vectors that they need, instead of all groups that have a sample in the shard.
        Where data-parallel ranks have one rank, or the vectors come with the shards, it returns `shards`.
        """
        if len(self.ranks) == len(shards) or all(
            isinstance(s.data, InlineData) for shard in shards for s in shard.samples
        ):
            return shards
        first = {rank["dp_rank"]: number for number, rank in reversed([*enumerate(self.ranks)])}
        calls = [
            (shards[rank["dp_rank"]].samples,) if first[rank["dp_rank"]] == number else None
            for number, rank in enumerate(self.ranks)
        ]
        answers = self.workers.scatter_with_data(Worker.gather_vectors.__name__, calls, parts=1)
        data = {rank["dp_rank"]: answer[1][0] for rank, answer in zip(self.ranks, answers, strict=True) if answer}
        return [
            replace(shard, samples=[replace(s, data=data[number], index=i) for i, s in enumerate(shard.samples)])
            for number, shard in enumerate(shards)
        ]

    def machine_load(self) -> list[MachineLoad]:
        """Return each rank's report of the load of its machine and device."""
        return self._call(Worker.machine_load)

    def start_profile(self, folder: Path, ranks: list[int]) -> None:
        self._call(Worker.start_profile, str(folder), ranks)

    def stop_profile(self) -> None:
        self._call(Worker.stop_profile)

    def hosts_seeing(self, path: Path) -> list[tuple[str, bool]]:
        """Return each rank's host, and whether `path` exists there."""
        return self._call(Worker.sees, str(path))

    def stage_save(self, folder: Path, copy: bool) -> list[tuple[int, list[str]]]:
        """Return each rank's bytes to write and its receipts, as paths within `folder`. See `Worker.stage_save`."""
        return self._call(Worker.stage_save, str(folder), copy)

    def write_save(self) -> None:
        self._call(Worker.write_save)

    def save_done(self, wait: bool) -> bool:
        return all(self._call(Worker.save_done, wait))

    def load_checkpoint(self, folder: Path) -> list[str | None]:
        """Return each rank's notice if its run does not continue bit for bit, else None."""
        return self._call(Worker.load, str(folder))

    def hold(self, step: int) -> None:
        """Note in each rank that it holds the weights after `step`."""
        self._call(Worker.hold, step)

    def held_steps(self) -> list[int | None]:
        """Return each rank's `Worker.held_step`."""
        return self._call(Worker.held_step)

    def save_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face model."""
        self._call(Worker.save_hf, str(folder.absolute()))

    def export_hf(self, folder: Path) -> tuple[int, int]:
        """Write the weights as a Hugging Face model, read it back and compare it.

        With LoRA the model has merged weights, and the adapters are also written to `adapter_folder(folder)`. Returns the
        number of tensors equal to the trainers', and of untrained tensors equal to the starting model's.
        """
        self.save_hf(folder)
        counts = self._call(Worker.compare_with_hf, str(folder.absolute()))[0]
        if self.recipe.lora.rank:
            self._call(Worker.save_adapter, str(adapter_folder(folder)))
        return counts

    def _send_norms(self, norms: GradNorms) -> None:
        """Send the gradient norms of earlier updates to all ranks, if these skip spikes (`train.on_spike`)."""
        if norms.skips:
            self._call(Worker.skip_spikes, norms.state())

    def onload(self) -> None:
        self._call(Worker.onload)

    def offload_optimizer(self) -> None:
        self._call(Worker.offload_optimizer)

    def offload_weights(self) -> None:
        self._call(Worker.offload_weights)

    def shutdown(self) -> None:
        """End the processes."""
        self.workers.shutdown()

    def _call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank; return the results in rank order."""
        assert not kwargs, "calls to processes have positional arguments only"
        return self.workers.call(method.__name__, *args)

    def _scatter(self, method: Callable[..., R], per_data_parallel_rank: Sequence[Any], *shared: Any) -> list[R]:
        """Run `method` on every rank with the item of its data-parallel rank and the `shared` arguments."""
        arguments = [(item, *shared) for item in per_data_parallel_rank]
        return self.workers.scatter(method.__name__, [arguments[rank["dp_rank"]] for rank in self.ranks])

    def _locate_vectors(
        self, method: Callable[..., Any], shared: tuple[Any, ...], sources: Sequence[Shard], targets: Sequence[Shard]
    ) -> list[list[VectorPart]]:
        """Publish per-sample vectors of this group for another group. Returns their locations, per target shard.

        sources: this group's shards. targets: the other group's shards of the same batch. method: a worker method that
        returns the vectors; it receives the `shared` arguments and, per target, the indices of samples in its own shard.
        """
        plan = routes(sources, targets)
        calls = [(*shared, [route.source for route in plan[rank["dp_rank"]]]) for rank in self.ranks]
        answers = self.workers.scatter_with_data(method.__name__, calls, parts=len(targets))
        parts: list[list[VectorPart]] = [[] for _ in targets]
        for rank, answer in zip(self.ranks, answers, strict=True):
            assert answer is not None
            for part, route, vectors in zip(parts, plan[rank["dp_rank"]], answer[1], strict=True):
                if rank["reports"] and route.target:
                    part.append((vectors, route.target))
        return parts


class ActorGroup(TrainerGroup):
    """The actor's processes (`ActorWorker`)."""

    def compute_old_log_probs(self, version: int) -> Metrics:
        """Compute log-probs before the step's updates. Returns metrics of their gap to the engine's.

        version: of the weights, for the lag of the tokens.
        """
        return total_mismatch(self._call(ActorWorker.compute_old_log_probs)).metrics(version)

    def mismatch_metrics(self, version: int) -> Metrics:
        """Return metrics of the step's log-prob gap to the engine. See `ActorWorker.measured_mismatch`."""
        return total_mismatch(self._call(ActorWorker.measured_mismatch)).metrics(version)

    def compute_reference_log_probs(self) -> int:
        """Compute the reference policy's log-probs. Returns the step of its weights; 0: before training."""
        return self._call(ActorWorker.compute_reference_log_probs)[0]

    def refresh_reference(self, step: int) -> None:
        """Make the current policy, after `step`, the reference policy."""
        self._call(ActorWorker.refresh_reference, step)

    def compute_kl(self, samples: int) -> np.ndarray:
        """Estimate each token's KL to the reference policy; these vectors stay in the processes. Returns the KL summed over
        each of the batch's `samples`, float64 [B]; 0 for a sample that no rank holds."""
        kl = np.zeros(samples)
        for sums in self._call(ActorWorker.compute_kl):
            for number, total in (sums or {}).items():
                kl[number] = total
        return kl

    def locate_kl(self, sources: Sequence[Shard], targets: Sequence[Shard]) -> list[list[VectorPart]]:
        """Return the locations of the KL vectors, per critic shard of `targets`. `sources`: this group's shards."""
        return self._locate_vectors(ActorWorker.collect_kl, (), sources, targets)

    def estimate_token_advantages(self, kl_weight: float, outcomes: Outcomes) -> Moments:
        """Estimate an advantage for each token, before whitening. Returns the moments over the batch with `outcomes`."""
        answers = self._call(ActorWorker.estimate_advantages, kl_weight, group_lengths(outcomes))
        return sum((moments for moments in answers if moments is not None), Moments())

    def whiten_advantages(self, whitening: Whitening) -> None:
        self._call(ActorWorker.whiten_advantages, whitening)

    def set_advantages(self, advantages: np.ndarray, shards: Sequence[Shard]) -> None:
        """Set the advantage of each token to its sample's. advantages [B]: of the batch. shards: the actor's."""
        per_shard = [[float(advantages[sample.number]) for sample in shard.samples] for shard in shards]
        self._scatter(ActorWorker.set_advantages, per_shard)

    def load_advantages(self, parts: Sequence[list[VectorPart]]) -> None:
        """Fetch each token's advantage from the critic's processes. `parts`: per data-parallel rank."""
        self._scatter(ActorWorker.load_advantages, parts)

    def correction_scales(self) -> list[float]:
        """Return, per mini batch, the factor that makes the mean of its correction weights 1."""
        return correction_scales(self._call(ActorWorker.correction_totals))

    def update(
        self, kl_weight: float, correction_scales: list[float] | None, norms: GradNorms
    ) -> list[list[Metrics] | None]:
        """Update the policy: one optimizer step per mini batch. Returns each rank's metrics per mini batch.

        norms: of the actor's earlier updates.
        """
        self._send_norms(norms)
        return self._call(ActorWorker.update_actor, kl_weight, correction_scales)

    def recorded_tokens(self) -> TokenVectors:
        """Return the values of each token that the last update has recorded. See `TokenRecorder`."""
        merged: TokenVectors = {}
        for vectors in self._call(ActorWorker.take_recorded_tokens):
            merged |= vectors
        return merged

    def compute_held_out_metrics(self) -> list[Metrics | None]:
        """Return each rank's part of the metrics of held-out rows."""
        return self._call(ActorWorker.compute_held_out_metrics)

    def open_weight_sync(self, receivers: list[tuple[str, str]], route: str) -> Session | str:
        """Open a weight sync session. Returns the session, or the reason (str) against `route`."""
        opened = self._call(ActorWorker.open_weight_sync, receivers, route)[0]
        assert opened is not None, "rank 0 returns the session"
        return opened

    def send_weights(self, version: int) -> list[UpdateReport]:
        """Send the weights to the engines. Returns the report of each rank that sent.

        Raises WeightSyncError if the update was aborted and the trainers go on (`rollout.min_engines`).
        """
        answers = self._call(ActorWorker.send_weights, version)
        for answer in answers:
            if isinstance(answer, AbortedUpdate):
                raise WeightSyncError(answer.reason)
        return [answer for answer in answers if isinstance(answer, UpdateReport)]


@dataclass(frozen=True)
class KLPenalty:
    """KL penalty on token rewards: `weight` times the KL that the actor's processes hold for their `shards`."""

    weight: float
    actor: ActorGroup
    shards: Sequence[Shard]


class CriticGroup(TrainerGroup):
    """The critic's processes (`CriticWorker`), in their own parallel layout. A step calls `load`, `compute_values`,
    `locate_advantages` and `update`, in this order."""

    def __init__(self, workers: WorkerGroup, view: Recipe, model_flops: ModelFlops | None = None) -> None:
        super().__init__(workers, view, model_flops)
        self._shards: list[Shard] = []
        self._moments = ValueMoments()

    def load(self, groups: Sequence[Group]) -> None:
        """Lay out a batch over the critic's ranks."""
        self._shards = self.plan(groups).shards
        self.load_shards(self._shards)

    def compute_values(self, kl: KLPenalty | None = None) -> None:
        """Compute values, advantages and returns; they stay in the processes. `kl`: subtracted from token rewards."""
        parts: list[list[VectorPart]] = [[] for _ in self._shards]
        if kl is not None:
            parts = kl.actor.locate_kl(kl.shards, self._shards)
        answers = self._scatter(CriticWorker.compute_values, parts, kl.weight if kl is not None else 0.0)
        self._moments = sum((moments for moments in answers if moments is not None), ValueMoments())

    def locate_advantages(self, targets: Sequence[Shard]) -> tuple[list[list[VectorPart]], Metrics]:
        """Whiten the advantages. Returns their locations, per actor shard of `targets`, and metrics."""
        whiten = self.recipe.algorithm.whiten_advantages
        whitening = Whitening.by(self._moments.advantages) if whiten else Whitening()
        parts = self._locate_vectors(CriticWorker.collect_advantages, (whitening,), self._shards, targets)
        return parts, value_metrics(self._moments, whitening)

    def update(self, norms: GradNorms) -> list[list[Metrics] | None]:
        """Update the critic: one optimizer step per mini batch. Returns each rank's metrics per mini batch.

        norms: of the critic's earlier updates.
        """
        self._send_norms(norms)
        self._shards = []  # frees the batch's vectors before the next batch is sampled
        return self._call(CriticWorker.update_critic)


def require_shared_storage(trainers: TrainerGroup, folder: Path) -> None:
    """Raise RuntimeError unless every trainer sees the run's directory, where it writes its part of a checkpoint."""
    token = folder / f".shared-{uuid.uuid4().hex}"
    token.touch()
    try:
        views = trainers.hosts_seeing(token)
    finally:
        token.unlink()
    blind = sorted({host for host, sees in views if not sees})
    if blind:
        raise RuntimeError(
            f"the run's directory {folder} is not shared: {', '.join(blind)} cannot see it. "
            "Set runs_dir to a path that every node mounts."
        )
