"""The critic as the controller sees it: its processes, and its part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.algorithms.values import ValueMoments, Whitening
from megarl.cluster.base import WorkerGroup
from megarl.config.schema import Recipe
from megarl.flops import ModelFlops
from megarl.shards import plan_step, routes
from megarl.types import DataRef, Group, Metrics, Shard

Part = tuple[DataRef, list[int]]
"""Vectors that lie somewhere, and the numbers, in a shard, of the samples they belong to."""


@dataclass
class Critic:
    """The critic's processes, in a layout of their own. In a step it is asked for
    `load`, `compute_values`, `advantages` and `update`."""

    recipe: Recipe  # the critic's view
    workers: WorkerGroup
    data_parallel_rank: list[int]  # of each process
    data_parallel: int
    reports: list[bool]  # which process of a data-parallel rank answers for it
    model_flops: ModelFlops | None  # what micro batches are balanced by; None: by tokens
    _shards: list[Shard] = field(default_factory=list)
    _moments: ValueMoments = field(default_factory=ValueMoments)

    @classmethod
    def of(cls, view: Recipe, workers: WorkerGroup, model_flops: ModelFlops | None) -> Critic:
        ranks = workers.call("describe")
        return cls(
            view,
            workers,
            data_parallel_rank=[rank["dp_rank"] for rank in ranks],
            data_parallel=ranks[0]["dp_size"],
            reports=[rank["reports"] for rank in ranks],
            model_flops=model_flops,
        )

    def load(self, groups: Sequence[Group]) -> None:
        """Lay a batch out over the critic's processes; each fetches the vectors of its own shard."""
        megatron = self.recipe.megatron
        stages = megatron.pipeline_parallel if megatron.virtual_pipeline else 1
        self._shards = plan_step(groups, self.recipe, self.data_parallel, stages, self.model_flops).shards
        self.workers.scatter("load_shard", [(self._shards[rank],) for rank in self.data_parallel_rank])

    def compute_values(self) -> None:
        found = [moments for moments in self.workers.call("compute_values") if moments is not None]
        self._moments = sum(found, ValueMoments())

    def advantages(self, targets: Sequence[Shard]) -> tuple[list[list[Part]], Metrics]:
        """For each of the actor's data-parallel ranks, whose shards `targets` are, where the advantages of its samples
        lie. The numbers that whitening needs are all that passes through here."""
        whiten = self.recipe.algorithm.whiten_advantages
        whitening = Whitening.by(self._moments.advantages) if whiten else Whitening()
        found = routes(self._shards, targets)
        answers = self.workers.scatter_with_data(
            "give_advantages",
            [(whitening, [route.source for route in found[rank]]) for rank in self.data_parallel_rank],
            parts=len(targets),
        )
        parts: list[list[Part]] = [[] for _ in targets]
        for rank, reports, (_, data) in zip(self.data_parallel_rank, self.reports, answers, strict=True):
            for target, route, where in zip(parts, found[rank], data, strict=True):
                if reports and route.target:
                    target.append((where, route.target))
        return parts, estimates(self._moments, whitening)

    def update(self) -> list[list[Metrics] | None]:
        """Learn from the batch; each process's metrics, mini batch by mini batch."""
        self._shards = []  # they hold references to the batch's vectors, which would stay alive while the next is sampled
        return self.workers.call("update_critic")


def estimates(moments: ValueMoments, whitening: Whitening) -> Metrics:
    """What is known of a batch's values, returns and advantages (these as the policy loss sees them)."""
    if not moments.values.count:
        return {}
    advantages = moments.advantages
    metrics = {
        "critic/values/mean": moments.values.mean,
        "critic/values/max": moments.values.largest,
        "critic/values/min": moments.values.least,
        "critic/returns/mean": moments.returns.mean,
        "critic/returns/max": moments.returns.largest,
        "critic/returns/min": moments.returns.least,
        "critic/advantages/mean": whitening(advantages.mean),
        "critic/advantages/max": whitening(advantages.largest),
        "critic/advantages/min": whitening(advantages.least),
    }
    if moments.returns.variance:
        # Returns less values are the advantages before whitening.
        metrics["critic/vf_explained_var"] = 1.0 - advantages.variance / moments.returns.variance
    return metrics
