"""The critic as the controller sees it: its processes, and its part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.algorithms.moments import Whitening
from megarl.algorithms.values import ValueMoments
from megarl.batching.flops import ModelFlops
from megarl.batching.plan import plan_step, routes
from megarl.cluster.base import WorkerGroup
from megarl.recipe.schema import Recipe
from megarl.types import DataRef, Group, Metrics, Shard

Part = tuple[DataRef, list[int]]
"""Vectors that lie somewhere, and the numbers, in a shard, of the samples they belong to."""


@dataclass(frozen=True)
class KLPenalty:
    """KL to the reference policy that is taken from rewards: `weight` times what the actor's processes hold."""

    weight: float
    workers: WorkerGroup
    ranks: list[int]  # data-parallel rank of each process
    reports: list[bool]  # which process of a data-parallel rank answers for it
    shards: list[Shard]  # the actor's, by data-parallel rank


def hand_over(
    workers: WorkerGroup,
    method: str,
    arguments: tuple[Any, ...],
    ranks: Sequence[int],
    reports: Sequence[bool],
    sources: Sequence[Shard],
    targets: Sequence[Shard],
) -> list[list[Part]]:
    """Have `workers`, whose shards `sources` are, give the vectors of each sample to whoever holds `targets`, two
    plans of one batch: of each target, where they lie. `method` takes `arguments` and the numbers, in its own shard,
    of the samples for each target."""
    found = routes(sources, targets)
    calls = [(*arguments, [route.source for route in found[rank]]) for rank in ranks]
    answers = workers.scatter_with_data(method, calls, parts=len(targets))
    parts: list[list[Part]] = [[] for _ in targets]
    for rank, answers_for_it, (_, data) in zip(ranks, reports, answers, strict=True):
        for target, route, where in zip(parts, found[rank], data, strict=True):
            if answers_for_it and route.target:
                target.append((where, route.target))
    return parts


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

    def compute_values(self, kl: KLPenalty | None = None) -> None:
        """`kl`: what is taken from each token's reward, and lies with the actor's processes."""
        parts: list[list[Part]] = [[] for _ in self._shards]
        if kl is not None:
            parts = hand_over(kl.workers, "give_kl", (), kl.ranks, kl.reports, kl.shards, self._shards)
        weight = kl.weight if kl is not None else 0.0
        answers = self.workers.scatter("compute_values", [(parts[rank], weight) for rank in self.data_parallel_rank])
        self._moments = sum((moments for moments in answers if moments is not None), ValueMoments())

    def advantages(self, targets: Sequence[Shard]) -> tuple[list[list[Part]], Metrics]:
        """For each of the actor's data-parallel ranks, whose shards `targets` are, where the advantages of its samples
        lie. The numbers that whitening needs are all that passes through here."""
        whiten = self.recipe.algorithm.whiten_advantages
        whitening = Whitening.by(self._moments.advantages) if whiten else Whitening()
        parts = hand_over(
            self.workers,
            "give_advantages",
            (whitening,),
            self.data_parallel_rank,
            self.reports,
            self._shards,
            targets,
        )
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
        **moments.values.metrics("critic/values", Whitening()),
        **moments.returns.metrics("critic/returns", Whitening()),
        **advantages.metrics("critic/advantages", whitening),
    }
    if moments.returns.variance:
        # Returns less values are the advantages before whitening.
        metrics["critic/vf_explained_var"] = 1.0 - advantages.variance / moments.returns.variance
    return metrics
