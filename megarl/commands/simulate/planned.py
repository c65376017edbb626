"""Costs and layouts of a recipe: the planner's seconds, and the splits of its devices. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megarl.commands.plan.routes import as_expected, expected_routes
from megarl.commands.plan.search.layouts import require_valid
from megarl.commands.plan.time.engines import decode_step, read
from megarl.commands.plan.time.estimate import HAND_OVER, Step
from megarl.commands.plan.time.lengths import Lengths
from megarl.commands.simulate.engine import Costs
from megarl.commands.simulate.group_filter import FilteredShare
from megarl.commands.simulate.lengths import LengthDistribution, moments
from megarl.errors import RecipeError, raise_all
from megarl.hf.shape import ModelShape, model_shape
from megarl.platform.device_table import Device
from megarl.preflight.findings import one_line
from megarl.preflight.models import sampled_errors
from megarl.preflight.recipe.fleet import fleet_errors
from megarl.recipe.algorithm import DynamicSamplingConfig
from megarl.recipe.derived.at_update import UpdateRule
from megarl.recipe.schema import Recipe, RolloutConfig

_POINTS = 64  # numbers of running requests for which a decode step is estimated; others are interpolated
_VECTORS = 9  # bytes per token: tokens int32, loss mask bool, log-probs float32 (types.SampleTokens)
_TEXT = 4  # bytes per token of the response's text: assumed

SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the trainers that are tried, rounded to whole layouts."""


def oversample_of(dynamic: DynamicSamplingConfig) -> float:
    """Return the number of groups that start for each place; 1 without dynamic sampling."""
    return dynamic.oversample if dynamic.enabled else 1.0


@dataclass(frozen=True)
class SimulatedRecipe:
    """A recipe, its models and device, and the lengths of its responses. `devices`: of engines and trainers together; `filtered`:
    groups that dynamic sampling filters; None: none."""

    recipe: Recipe
    models: Mapping[str, dict[str, Any]]  # config.json by section, as in `estimate`
    device: Device
    devices: int
    lengths: LengthDistribution
    seed: int = 0
    filtered: FilteredShare | None = None

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.models["rollout"])

    @cached_property
    def _moments(self) -> tuple[float, float]:
        return moments(self.lengths, self.seed)

    @property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return self._moments[0]

    def costs(self, layout: Recipe) -> Costs:
        """Return the costs of `layout`, this recipe with another placement or other numbers of processes."""
        layout = as_expected(layout, expected_routes(layout, self.device))
        mean, age = self._moments
        limit = layout.rollout.max_response_length
        lengths = Lengths.around(self.lengths.prompt, min(max(1.0, mean), limit), limit, self.lengths.assumed)
        teacher = model_shape(self.models["teacher"]) if "teacher" in self.models else None
        step = Step(layout, self.device, lengths, self.shape, teacher_shape=teacher)
        seconds = {phase.name: phase.seconds for phase in step.phases()}
        training = sum(seconds.values()) - sum(seconds.get(name, 0.0) for name in ("gen", HAND_OVER, "weight_sync"))
        engines, factor = step.engines, self.device.factors.get("gen", 1.0)
        places = layout.data.prompts_per_step * (layout.rollout.max_staleness + 1)
        alive = math.ceil(places * oversample_of(layout.algorithm.dynamic_sampling)) * layout.rollout.samples_per_prompt
        most = int(min(engines.sequences, alive))
        points = np.unique(np.rint(np.geomspace(1, most, _POINTS)).astype(np.int64))
        cached = self.lengths.prompt + age
        steps = [decode_step(engines, float(point), cached).seconds * factor for point in points]
        prefill = read(replace(engines, count=1), lengths.tokens, 1.0).seconds * factor
        return Costs(
            engines=engines.count,
            decode=np.interp(np.arange(most + 1), points, steps),
            prefill=prefill / lengths.tokens,
            training=training / (step.samples * lengths.tokens),
            weight_sync=seconds.get("weight_sync", 0.0),
            load=seconds.get("weight_sync", 0.0),
            hand_over=seconds.get(HAND_OVER, 0.0),
            prompt=self.lengths.prompt,
            shares_prefix=engines.prefix,
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a finished sample in host memory, per token."""
        routed = self.recipe.megatron.routing_replay == "rollout"
        return _VECTORS + _TEXT + (2 * self.shape.layers * self.shape.chosen if routed else 0)

    # --- layouts -----------------------------------------------------------------------------------------------------

    def colocated(self, max_staleness: float = 0, window: float = 0.0) -> Recipe:
        """Return the recipe with engines and trainers that share all devices. `max_staleness` 0: the synchronous recipe."""
        recipe = self.recipe
        moved = recipe.cluster.placement != "colocated"
        transport = "auto" if recipe.weight_sync.transport == "device" else recipe.weight_sync.transport
        layout = replace(
            recipe,
            cluster=replace(recipe.cluster, placement="colocated", trainers=self.devices),
            megatron=replace(recipe.megatron, offload=None if moved else recipe.megatron.offload),
            weight_sync=replace(recipe.weight_sync, transport=transport),
            rollout=replace(
                recipe.rollout,
                engines=self.devices // recipe.rollout.tensor_parallel,
                max_staleness=max_staleness,
                at_update="refresh" if max_staleness else "auto",
                refresh_after=None,
                window=window if max_staleness else RolloutConfig().window,
            ),
        )
        return _without_refused_min_engines(layout)

    def split(self, trainers: int, rule: UpdateRule, max_staleness: float, window: float) -> Recipe:
        """Return the recipe with separate devices for `trainers` and engines."""
        recipe = self.recipe
        layout = replace(
            recipe,
            cluster=replace(recipe.cluster, placement="disaggregated", trainers=trainers),
            megatron=replace(recipe.megatron, offload=None if recipe.megatron.offload else recipe.megatron.offload),
            rollout=replace(
                recipe.rollout,
                engines=(self.devices - trainers) // recipe.rollout.tensor_parallel,
                max_staleness=max_staleness,
                at_update=rule,
                refresh_after=recipe.rollout.refresh_after if rule == "keep" else None,
                window=RolloutConfig().window if rule == "drain" else window,  # drain refuses another
            ),
        )
        return _without_refused_min_engines(layout)

    def oversampled(self, layout: Recipe, oversample: float) -> Recipe:
        """Return `layout` with another `algorithm.dynamic_sampling.oversample`."""
        algorithm = layout.algorithm
        dynamic = replace(algorithm.dynamic_sampling, oversample=oversample)
        return replace(layout, algorithm=replace(algorithm, dynamic_sampling=dynamic))

    def refusal(self, layout: Recipe) -> str | None:
        """Return the reason for which a run would refuse `layout`, or None."""
        try:
            require_valid(layout, self.models["rollout"])
            raise_all(sampled_errors(layout, self.models["rollout"]))
        except ValueError as error:
            return one_line(f"{error.key}: {error.problem}" if isinstance(error, RecipeError) else str(error))
        return None

    @property
    def blocks(self) -> tuple[int, int]:
        """Fewest trainers and fewest devices of engines; larger numbers are multiples."""
        megatron, rollout = self.recipe.megatron, self.recipe.rollout
        stage = math.lcm(
            megatron.tensor_parallel * megatron.context_parallel,
            megatron.expert_parallel * (megatron.expert_tensor_parallel or 1),
        )
        return megatron.pipeline_parallel * stage, rollout.tensor_parallel * rollout.data_parallel

    def trainer_counts(self) -> list[int]:
        """Return numbers of trainers for which trainers and engines have whole layouts and use all devices."""
        block, group = self.blocks
        whole = [count for count in range(block, self.devices, block) if (self.devices - count) % group == 0]
        if not whole:
            return []
        nearest = {min(whole, key=lambda count: abs(count - share * self.devices)) for share in SPLITS}
        if self.recipe.cluster.placement == "disaggregated" and self.recipe.cluster.trainers in whole:
            nearest.add(self.recipe.cluster.trainers)
        return sorted(nearest)


def _without_refused_min_engines(layout: Recipe) -> Recipe:
    """Return `layout` without the recipe's `rollout.min_engines` and `rollout.step_timeout` if a run of this layout refuses them."""
    least = layout.rollout.min_engines
    if least is None or not any(error.key == "rollout.min_engines" for error in fleet_errors(layout)):
        return layout
    rollout = replace(layout.rollout, min_engines=None, step_timeout=RolloutConfig().step_timeout)
    return replace(layout, rollout=rollout)
