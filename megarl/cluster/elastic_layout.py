"""Choose the layout of a run that has fewer devices than its recipe states (`cluster.elastic`): pure arithmetic.

Tensor, pipeline, context and expert parallel sizes stay; the numbers of data-parallel replicas and of engines shrink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megarl.cluster.device_map import Demand
from megarl.errors import pluralize
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig


@dataclass(frozen=True)
class LayoutSizes:
    """Numbers of a layout that may shrink: data-parallel replicas of actor and critic, and engines. 0: the run has none."""

    replicas: int
    critic_replicas: int
    engines: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.replicas, self.critic_replicas, self.engines))


class ElasticLayouts:
    """The layouts that a run of `recipe` may take. demand: of the recipe. full: sizes of the recipe's layout.

    The recipe's layout must be valid: parallel sizes divide the trainers, and engine groups the engines.
    """

    def __init__(self, recipe: Recipe, demand: Demand) -> None:
        self._recipe, self._demand = recipe, demand
        self._model_size, self._critic_size = model_parallel(recipe.megatron), model_parallel(recipe.critic.megatron)
        self.full = LayoutSizes(
            demand.trainers // self._model_size, demand.critics // self._critic_size, demand.engines
        )
        group = recipe.rollout.data_parallel
        least = -(-(recipe.rollout.min_engines or 1) // group) * group
        self._allowed = (
            _multiples(replica_step(recipe.megatron), self.full.replicas),
            _multiples(replica_step(recipe.critic.megatron), self.full.critic_replicas),
            [count for count in _multiples(group, self.full.engines) if count >= least],
        )

    @property
    def least(self) -> LayoutSizes:
        """The smallest layout."""
        return LayoutSizes(*(allowed[0] if allowed else 0 for allowed in self._allowed))

    def choose(self, fits: Callable[[Demand], bool]) -> LayoutSizes | None:
        """Return the layout for the devices that `fits` knows; None if not even the smallest layout fits.

        The layout has the largest possible share of the recipe's replicas, or of its engines, whichever share is smaller. Devices
        that are left go to further replicas, then to replicas of the critic, then to engines.
        """
        shares = {
            Fraction(count, full) for full, allowed in zip(self.full, self._allowed, strict=True) for count in allowed
        }
        for share in sorted(shares, reverse=True):
            sizes = self._with_share(share)
            if fits(self.demand(sizes)):
                return self._grown(sizes, fits)
        return None

    def demand(self, sizes: LayoutSizes) -> Demand:
        """Return the devices that the layout needs."""
        trainers, critics = sizes.replicas * self._model_size, sizes.critic_replicas * self._critic_size
        return replace(self._demand, trainers=trainers, critics=critics, engines=sizes.engines)

    def recipe(self, sizes: LayoutSizes) -> Recipe:
        """Return the recipe in this layout. Traces of ranks and engines that it lacks are left out (`observe.profile_ranks`)."""
        recipe, demand = self._recipe, self.demand(sizes)
        ranks = [rank for rank in recipe.observe.profile_ranks if rank < demand.trainers]
        engines = [number for number in recipe.observe.profile_engines if number < max(1, sizes.engines)]
        steps = recipe.observe.profile_steps if ranks or engines else []
        return replace(
            recipe,
            cluster=replace(recipe.cluster, trainers=demand.trainers),
            critic=replace(recipe.critic, trainers=demand.critics) if demand.critics else recipe.critic,
            rollout=replace(recipe.rollout, engines=sizes.engines) if sizes.engines else recipe.rollout,
            observe=replace(
                recipe.observe, profile_ranks=ranks, profile_engines=engines if steps else [], profile_steps=steps
            ),
        )

    def text(self, sizes: LayoutSizes) -> str:
        """Describe a layout: "4 trainers (2 replicas) and 2 engines"."""
        demand, parts = self.demand(sizes), []
        for count, word, copies in (
            (demand.trainers, "trainer", sizes.replicas),
            (demand.critics, "critic", sizes.critic_replicas),
        ):
            copies_text = f" ({pluralize(copies, 'replica')})" if copies != count else ""
            parts += [f"{pluralize(count, word)}{copies_text}"] if count else []
        parts += [pluralize(sizes.engines, "engine")] if sizes.engines else []
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    def _with_share(self, share: Fraction) -> LayoutSizes:
        """Return the smallest layout with at least this share of the recipe's numbers; on shared devices see `_followed`."""
        counts = [
            next((count for count in allowed if count >= share * full), 0)
            for full, allowed in zip(self.full, self._allowed, strict=True)
        ]
        return self._followed(LayoutSizes(*counts))

    def _followed(self, sizes: LayoutSizes) -> LayoutSizes:
        """Return the layout with as many critics and engines as its trainers have devices for, if all share them: the largest share
        that is not above the share of the replicas, and at least the smallest number."""
        if not self._demand.shared:
            return sizes
        share = Fraction(sizes.replicas, self.full.replicas)
        counts = [
            max((count for count in allowed if count <= share * full), default=allowed[0] if allowed else 0)
            for full, allowed in zip(self.full, self._allowed, strict=True)
        ]
        return LayoutSizes(sizes.replicas, *counts[1:])

    def _grown(self, sizes: LayoutSizes, fits: Callable[[Demand], bool]) -> LayoutSizes:
        """Return a layout with as many more replicas, then critics, then engines as `fits` allows."""
        for field, allowed in zip(("replicas", "critic_replicas", "engines"), self._allowed, strict=True):
            for count in allowed:
                larger = self._followed(replace(sizes, **{field: max(count, getattr(sizes, field))}))
                if fits(self.demand(larger)):
                    sizes = larger
        return sizes


def model_parallel(megatron: MegatronConfig) -> int:
    """Return the number of trainers of one replica of the model."""
    return megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel


def replica_step(megatron: MegatronConfig) -> int:
    """Return the number of which the replicas must be a multiple: experts are spread over data x tensor x context parallel.

    Nothing else divides by the replicas: micro batches are balanced by tokens, and ranks without a sample get a filler.
    """
    experts = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    return experts // math.gcd(experts, megatron.tensor_parallel * megatron.context_parallel)


def _multiples(step: int, most: int) -> Sequence[int]:
    """Return the multiples of `step` from `step` to `most`."""
    return range(step, most + 1, step)
