"""Fit check of a layout: a run's own checks, then the forecast of its memory, then the counted memory."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.devices import (
    ROLLOUT,
    Occupants,
    largest_tensor,
    places,
    swaps_of,
    whole_expert_bytes,
)
from megarl.commands.plan.count.engines import min_engine_bytes, not_counted, policy_engines, rank_of, too_small
from megarl.commands.plan.count.host import host_refusals, hosts_of, keeps_weights
from megarl.commands.plan.count.libraries import Libraries, counted_libraries
from megarl.commands.plan.count.rank_client import RankClient
from megarl.commands.plan.count.stages import built_from, stages_of
from megarl.commands.plan.count.types import EngineRank, PipelineStage, RankMemory
from megarl.commands.plan.search.forecast import Forecast
from megarl.commands.plan.search.layouts import Choice, EngineLayout, apply_choice, choice_of, refusal
from megarl.commands.plan.search.lower_bound import largest_parts, min_held_bytes, min_peak_bytes, parts
from megarl.commands.plan.time.estimate import Step, duration
from megarl.commands.plan.time.lengths import Lengths
from megarl.errors import InputError, pluralize
from megarl.hf.shape import ModelShape, model_shape
from megarl.platform.device_table import Device
from megarl.recipe.schema import Recipe

EngineChoice = tuple[EngineLayout, EngineRank | None]
"""Engines, and one device of them; None: no engines, or they cannot be counted here."""

NEAR = 1.01
"""A layout is counted if its forecast is at most this multiple of the limit: forecasts are off by some thousandths."""


class HostTooSmallError(Exception):
    """A layout fits the devices but needs more host memory than a machine has. The message is the plan's refusal."""


@dataclass(frozen=True)
class Subject:
    """The recipe, models and device of a search. `response`: mean tokens of a response, for estimates."""

    recipe: Recipe
    model: dict[str, Any]
    critic_model: dict[str, Any] | None  # None: no critic
    device: Device
    response: float | None = None

    def step_seconds(self, recipe: Recipe) -> float:
        """Return the estimated seconds of a step of `recipe`, which differs from this one only in its layout."""
        lengths = Lengths.of(recipe, self.response)
        step = Step(recipe, self.device, lengths, self.shape, self.critic_shape, cache=self._step_parts)
        return duration(step.phases())

    @cached_property
    def _step_parts(self) -> dict[Hashable, Any]:
        return {}

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """config.json of each model, by section of the recipe."""
        return {ROLLOUT: self.model} | ({"critic": self.critic_model} if self.critic_model else {})

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.device.memory * 2**30

    @cached_property
    def min_engine_bytes(self) -> float:
        """Lower bound of the bytes that an engine takes on its device."""
        return min_engine_bytes(self.recipe, self.device.memory)

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @cached_property
    def critic_shape(self) -> ModelShape | None:
        return model_shape(self.critic_model) if self.critic_model else None


class FitChecker:
    """Checks whether layouts of one recipe fit.

    `directory`: an empty one. `engines`: candidates, best first; the first that has room for a sequence is chosen.
    `deadline` (time.monotonic): counting of engines stops there. `counted_engines`: engines that were already chosen and counted.
    """

    def __init__(
        self,
        subject: Subject,
        client: RankClient,
        directory: Path,
        engines: list[EngineLayout],
        deadline: float,
        counted_engines: EngineChoice | None = None,
    ) -> None:
        self._subject, self._client, self._shape = subject, client, subject.shape
        self._deadline = deadline
        self._directory = directory
        self._engine_candidates = engines if counted_engines is None else [counted_engines[0]]
        self._not_counted: str | None = None  # until engines are chosen
        self._built = built_from(subject.recipe, subject.model, directory / "model")
        self._forecast = Forecast(client, self._built, subject.model, self._shape, directory / "samples")
        executor = ThreadPoolExecutor(2)  # both take seconds, during which layouts are estimated
        self._chosen = executor.submit(self._choose_engines if counted_engines is None else lambda: counted_engines)
        self._critic = executor.submit(self._stages_of_critic)
        executor.shutdown(wait=False)

    @property
    def engines(self) -> EngineLayout:
        """The chosen engines. Raises InputError if none of the candidates fits."""
        return self._chosen.result()[0]

    @property
    def not_counted(self) -> str | None:
        """Unknown memory of the chosen engines' devices, with the reason; None: nothing is unknown."""
        self._chosen.result()
        return self._not_counted

    def refused(self, choice: Choice) -> str | None:
        """Return the error of a run with this layout, or None. All candidate engines are valid."""
        return refusal(self._with_first_engines(self._subject.recipe, choice), self._subject.model)

    def too_large(self, choice: Choice) -> bool:
        """Return True if the layout cannot fit, by arithmetic alone."""
        return too_large(self._subject, choice)

    def is_forecast(self, choice: Choice) -> bool:
        """Return True if `excess` needs no further counting, which takes seconds."""
        recipe = apply_choice(self._built, choice)
        return self._forecast.knows(recipe.megatron) and (self._chosen.done() or not _stays(choice, recipe))

    def excess(self, choice: Choice, near: float = NEAR) -> float:
        """Return the bytes by which the forecast exceeds `near` times the device; 0: the layout might fit."""
        most, recipe = near * self._subject.limit, apply_choice(self._built, choice)
        if _stays(choice, recipe) and (rank := self._chosen.result()[1]) is not None:
            needed = _resident(recipe, self._shape) + rank.weights + (rank.cache or 0) + rank.working
            if needed > most:
                return needed - most
        return max(0.0, self._forecast.peak(recipe) - most)

    def peak(self, choice: Choice) -> int:
        """Count the bytes of the fullest device. Raises ValueError if Megatron refuses the layout, and HostTooSmallError if
        it fits the devices but not the hosts."""
        recipe = self._with_first_engines(self._built, choice)  # engines do not change the trainers' memory
        numbers = (
            [part.number for part in largest_parts(recipe.megatron, self._shape)] if self._is_uniform(recipe) else None
        )
        stages = stages_of("actor", recipe, self._subject.recipe.megatron, self._client, numbers)
        recipe = self.with_chosen_engines(self._built, choice)
        critic = self._critic.result()
        for stage in (*stages, *critic):
            if stage.activations is None:
                raise InputError(f"No layout can be shown to fit: {stage.not_counted}.")
        occupants = self._occupants(recipe, [*stages, *critic])
        peak = max(kind.peak.total for kind in places(occupants, libraries=self._libraries(recipe)))
        if peak <= self._subject.limit:
            self._check_hosts(occupants, stages, critic)
        return peak

    def _occupants(self, recipe: Recipe, stages: list[PipelineStage]) -> Occupants:
        """Return the processes on the devices of a layout. `recipe`: with the chosen engines."""
        rank, original = self._chosen.result()[1], self._subject.recipe
        return Occupants(
            recipe,
            stages,
            {} if rank is None else {ROLLOUT: rank},
            swaps_of(original),
            largest_tensor(original.model.dtype, self._subject.model),
            keeps_weights(original.cluster, self._subject.device),
            whole_expert_bytes(original.model.dtype, self._subject.model),
        )

    def _check_hosts(self, occupants: Occupants, counted: list[PipelineStage], critic: list[PipelineStage]) -> None:
        """Raise HostTooSmallError if a machine's host has too little memory.

        `counted`: the actor's stages, or only the stages that could have the peak. In that case the rest is counted only if
        hosts would be too small with the largest stage everywhere.
        """
        device, stages = self._subject.device, occupants.recipe.megatron.pipeline_parallel
        if len(counted) < stages:
            whole = replace(occupants, stages=[*worst_case_stages(counted, stages), *critic])
            if not host_refusals(hosts_of(whole, device), device.host_memory):
                return
            numbers_counted = {stage.number for stage in counted}
            numbers = [number for number in range(stages) if number not in numbers_counted]
            megatron = self._subject.recipe.megatron
            rest = stages_of("actor", occupants.recipe, megatron, self._client, numbers)
            every = sorted([*counted, *rest], key=lambda stage: stage.number)
            occupants = replace(occupants, stages=[*every, *critic])
        for short in host_refusals(hosts_of(occupants, device), device.host_memory):
            raise HostTooSmallError(f"{short.problem}. {short.key}: {short.remedy}")

    def _libraries(self, recipe: Recipe) -> Libraries:
        """Return the device memory of libraries in a layout."""
        models = {ROLLOUT: self._subject.model}
        return counted_libraries(recipe, models, self._subject.device)

    def _is_uniform(self, recipe: Recipe) -> bool:
        """Return True if every trainer shares its device with the same processes."""
        used = {engines.engines * engines.tensor_parallel for engines in self._engine_candidates}
        everywhere = recipe.train.source != "rollout" or used == {recipe.cluster.trainers}
        return self._subject.critic_model is None and (everywhere or recipe.cluster.placement != "colocated")

    def _with_first_engines(self, recipe: Recipe, choice: Choice) -> Recipe:
        """Return `recipe` with candidate engines, without waiting for the choice."""
        return apply_choice(recipe, replace(choice, engines=self._engine_candidates[0]))

    def with_chosen_engines(self, recipe: Recipe, choice: Choice) -> Recipe:
        """Return `recipe` with `choice` and the chosen engines."""
        return apply_choice(recipe, replace(choice, engines=self.engines))

    def _choose_engines(self) -> EngineChoice:
        recipe, choice = self._subject.recipe, choice_of(self._subject.recipe)
        if recipe.train.source != "rollout":
            return choice.engines, None
        candidates = [apply_choice(recipe, replace(choice, engines=engines)) for engines in self._engine_candidates]
        kinds = policy_engines(candidates, self._subject.model, self._deadline)
        for engines, kind in zip(self._engine_candidates, kinds, strict=True):
            rank = rank_of(kind, self._subject.device.memory, self._libraries(recipe).communicators.get("rollout", 0))
            if rank is not None and too_small(kind, rank, self._subject.device.memory) is None:
                self._not_counted = not_counted(kind, self._subject.device.memory)
                return engines, rank
        if all(kind.counts is None for kind in kinds):
            self._not_counted = not_counted(kinds[0], self._subject.device.memory)
            return choice.engines, None
        raise InputError(
            f"{pluralize(len(kinds), 'engine layout')} were counted, the fastest by estimate, and none has room for a sequence "
            "of the longest length: give rollout.engine_args another share of the device, or use more devices."
        )

    def _stages_of_critic(self) -> list[PipelineStage]:
        recipe, model = self._subject.recipe, self._subject.critic_model
        if model is None:
            return []
        view = replace(recipe, critic=replace(recipe.critic, model_path=None))
        built = built_from(view, model, self._directory / "critic")
        return stages_of("critic", built, recipe.critic.megatron, self._client)


def worst_case_stages(counted: list[PipelineStage], stages: int) -> list[PipelineStage]:
    """Return as many `stages` as the pipeline has, each with the maximum of every part over `counted`."""
    names = [part.name for part in fields(RankMemory)]
    most = RankMemory(**{name: max(getattr(stage.held, name) for stage in counted) for name in names})
    return [replace(counted[0], number=number, held=most) for number in range(stages)]


def too_large(subject: Subject, choice: Choice) -> bool:
    """Return True if the layout cannot fit, by arithmetic alone."""
    recipe = apply_choice(subject.recipe, choice)
    if _stays(choice, recipe) and _resident(recipe, subject.shape) + subject.min_engine_bytes > subject.limit:
        return True
    return min_peak_bytes(recipe, subject.shape) > subject.limit


def _stays(choice: Choice, recipe: Recipe) -> bool:
    """Return True if trainers stay on a shared device while engines sample."""
    return recipe.cluster.placement == "colocated" and recipe.train.source == "rollout" and not choice.offload


def _resident(recipe: Recipe, shape: ModelShape) -> float:
    """Return a lower bound of the bytes that trainers hold."""
    return max(min_held_bytes(recipe, shape, part) for part in parts(recipe.megatron, shape))
