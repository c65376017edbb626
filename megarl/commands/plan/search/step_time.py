"""Estimated step time of many layouts of one recipe: `estimate`, with shared parts computed once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megarl.commands.plan.time.cost import Cost
from megarl.commands.plan.time.estimate import Step, spans
from megarl.commands.plan.time.lengths import Lengths, MicroBatches
from megarl.commands.plan.time.trainers import Trainers
from megarl.hf.shape import ModelShape
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe

T = TypeVar("T")


class StepTimes:
    """Estimates steps of recipes that differ only in layout."""

    def __init__(self, device: Device, shape: ModelShape, critic: ModelShape | None, response: float | None) -> None:
        self._device, self._shape, self._critic, self._response = device, shape, critic, response
        self._cache: dict[Hashable, Any] = {}

    def seconds(self, recipe: Recipe) -> float:
        """Return the estimated seconds of one step."""
        lengths = Lengths.of(recipe, self._response)
        step = _Shared(recipe, self._device, lengths, self._shape, self._critic, cache=self._cache)
        return max(end for _, end in spans(step.phases()))


@dataclass
class _Shared(Step):
    """A step that shares equal parts with other layouts of the recipe. `cache`: their values."""

    cache: dict[Hashable, Any] = field(default_factory=dict)

    def _once(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.cache:
            self.cache[key] = compute()
        value: T = self.cache[key]
        return value

    def _generate(self) -> Cost:
        rollout = self.recipe.rollout
        key = "gen", rollout.engines, rollout.tensor_parallel, rollout.data_parallel, rollout.expert_parallel
        return self._once(key, super()._generate)

    def _batches(self, trainers: Trainers) -> MicroBatches:
        recipe, megatron = trainers.recipe, trainers.recipe.megatron
        every = megatron.pipeline_parallel if megatron.virtual_pipeline else 1
        tokens = recipe.actor.max_tokens_per_micro_batch
        key = "batches", trainers.output, trainers.data_parallel, megatron.context_parallel, every, tokens
        return self._once(key, lambda: super(_Shared, self)._batches(trainers))
