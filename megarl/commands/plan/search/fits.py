"""Whether a layout fits: what a run would refuse, what is forecast, what is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.devices import ROLLOUT, largest_tensor, places, swaps_of
from megarl.commands.plan.count.engines import not_counted, policies, rank_of, taken_at_least, too_small
from megarl.commands.plan.count.host import Tenants, host_refusals, hosts_of, keeps_weights
from megarl.commands.plan.count.libraries import Libraries, counted_libraries
from megarl.commands.plan.count.rank_client import RankClient
from megarl.commands.plan.count.stages import built_from, stages_of
from megarl.commands.plan.count.types import EngineRank, RankMemory, Stage
from megarl.commands.plan.search.forecast import Forecast
from megarl.commands.plan.search.layouts import Choice, Engines, choice_of, chosen, refusal
from megarl.commands.plan.search.lower_bound import at_least, held_at_least, largest_parts, parts
from megarl.errors import InputError
from megarl.hf.shape import ModelShape, model_shape
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe
from megarl.text import pluralize

Chosen = tuple[Engines, EngineRank | None]
"""Engines, and one device of them; None: there are none, or nothing here can count them."""

_NEAR = 1.01
"""How much above the limit a forecast may lie for a layout to be counted: forecasts are some thousandths off."""


class HostTooSmallError(Exception):
    """A layout that fits the devices needs more host memory than a machine has. The message is the plan's refusal."""


@dataclass(frozen=True)
class Subject:
    """What layouts are looked for. `response`: mean tokens of one, for estimates."""

    recipe: Recipe
    model: dict[str, Any]
    critic_model: dict[str, Any] | None  # None: there is no critic
    device: Device
    response: float | None = None

    @property
    def limit(self) -> float:
        """Bytes of the device."""
        return self.device.memory * 2**30

    @cached_property
    def taken(self) -> float:
        """Bytes of the device that an engine takes at least."""
        return taken_at_least(self.recipe, self.device.memory)

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @cached_property
    def critic_shape(self) -> ModelShape | None:
        return model_shape(self.critic_model) if self.critic_model else None


class Judge:
    """Of layouts of one recipe. `directory`: an empty one. `engines`: those to choose from, the best first; the first whose
    devices hold what they must is chosen. `deadline`, of time.monotonic: asking about engines ends there. `known`: engines
    that were chosen and counted before."""

    def __init__(
        self,
        subject: Subject,
        client: RankClient,
        directory: Path,
        engines: list[Engines],
        deadline: float,
        known: Chosen | None = None,
    ) -> None:
        self._subject, self._client, self._shape = subject, client, subject.shape
        self._deadline = deadline
        self._directory, self._choices = directory, engines if known is None else [known[0]]
        self._not_counted: str | None = None  # until engines are chosen
        self._built = built_from(subject.recipe, subject.model, directory / "model")
        self._forecast = Forecast(client, self._built, subject.model, self._shape, directory / "samples")
        beside = ThreadPoolExecutor(2)  # both take seconds, in which layouts are estimated
        self._chosen = beside.submit(self._choose_engines if known is None else lambda: known)
        self._critic = beside.submit(self._stages_of_critic)
        beside.shutdown(wait=False)

    @property
    def engines(self) -> Engines:
        """The chosen ones. Raises InputError where all are too large."""
        return self._chosen.result()[0]

    @property
    def not_counted(self) -> str | None:
        """What is not known of the chosen engines' devices, and why."""
        self._chosen.result()
        return self._not_counted

    def refused(self, choice: Choice) -> str | None:
        """What a run would say of it, with whichever engines: those to choose from are none that it refuses."""
        return refusal(self._with_some(self._subject.recipe, choice), self._subject.model)

    def too_large(self, choice: Choice) -> bool:
        """By arithmetic alone."""
        return too_large(self._subject, choice)

    def is_forecast(self, choice: Choice) -> bool:
        """Whether `excess` has all that it needs: else it takes seconds."""
        recipe = chosen(self._built, choice)
        return self._forecast.knows(recipe) and (self._chosen.done() or not _stays(choice, recipe))

    def excess(self, choice: Choice, near: float = _NEAR) -> float:
        """Bytes by which the forecast lies above `near` times the device; 0: it might fit."""
        most, recipe = near * self._subject.limit, chosen(self._built, choice)
        if _stays(choice, recipe) and (rank := self._chosen.result()[1]) is not None:
            beside = _resident(recipe, self._shape) + rank.weights + (rank.cache or 0) + rank.working
            if beside > most:
                return beside - most
        return max(0.0, self._forecast.peak(recipe) - most)

    def peak(self, choice: Choice) -> int:
        """Bytes of the device that needs the most, counted. Raises ValueError for what Megatron refuses as it is built, and
        HostTooSmallError for a layout that fits the devices and not their hosts."""
        recipe = self._with_some(self._built, choice)  # of trainers, engines make no difference
        numbers = [part.number for part in largest_parts(recipe, self._shape)] if self._alike(recipe) else None
        found = stages_of("actor", recipe, self._subject.recipe.megatron, self._client, numbers)
        recipe = self.made(self._built, choice)
        critic = self._critic.result()
        for stage in (*found, *critic):
            if stage.activations is None:
                raise InputError(f"No layout can be said to fit: {stage.not_counted}.")
        tenants = self._tenants(recipe, [*found, *critic])
        lying = places(
            recipe,
            tenants.stages,
            dict(tenants.engines),
            swaps=dict(tenants.swaps),
            largest=tenants.largest,
            libraries=self._libraries(recipe),
        )
        peak = max(place.peak.total for place in lying)
        if peak <= self._subject.limit:
            self._check_hosts(tenants, found, critic)
        return peak

    def _tenants(self, recipe: Recipe, found: list[Stage]) -> Tenants:
        """What runs on the devices of a layout. `recipe`: with the chosen engines."""
        rank, own = self._chosen.result()[1], self._subject.recipe
        return Tenants(
            recipe,
            found,
            {} if rank is None else {ROLLOUT: rank},
            swaps_of(own),
            largest_tensor(own, self._subject.model),
            keeps_weights(own, self._subject.device),
        )

    def _check_hosts(self, tenants: Tenants, counted: list[Stage], critic: list[Stage]) -> None:
        """Raise HostTooSmallError if a machine's host has too little. `counted`: the actor's stages, or those of them that
        no earlier one covers; then the rest is counted only where hosts full of the largest would not do."""
        device, stages = self._subject.device, tenants.recipe.megatron.pipeline_parallel
        if len(counted) < stages:
            whole = replace(tenants, stages=[*covering(counted, stages), *critic])
            if not host_refusals(hosts_of(whole, device), device.host_memory):
                return
            there = {stage.number for stage in counted}
            numbers = [number for number in range(stages) if number not in there]
            megatron = self._subject.recipe.megatron
            rest = stages_of("actor", tenants.recipe, megatron, self._client, numbers)
            every = sorted([*counted, *rest], key=lambda stage: stage.number)
            tenants = replace(tenants, stages=[*every, *critic])
        for short in host_refusals(hosts_of(tenants, device), device.host_memory):
            raise HostTooSmallError(f"{short.what}. {short.key}: {short.remedy}")

    def _libraries(self, recipe: Recipe) -> Libraries:
        """Device memory of libraries in a layout."""
        models = {ROLLOUT: self._subject.model}
        return counted_libraries(recipe, models, self._subject.device)

    def _alike(self, recipe: Recipe) -> bool:
        """Whether the same lies beside every trainer."""
        used = {engines.engines * engines.tensor_parallel for engines in self._choices}
        everywhere = recipe.train.source != "rollout" or used == {recipe.cluster.trainers}
        return self._subject.critic_model is None and (everywhere or not _shared(recipe))

    def _with_some(self, recipe: Recipe, choice: Choice) -> Recipe:
        """With engines to choose from, without waiting for the choice."""
        return chosen(recipe, replace(choice, engines=self._choices[0]))

    def made(self, recipe: Recipe, choice: Choice) -> Recipe:
        """`recipe` as `choice` says, with the chosen engines."""
        return chosen(recipe, replace(choice, engines=self.engines))

    def _choose_engines(self) -> Chosen:
        recipe, own = self._subject.recipe, choice_of(self._subject.recipe)
        if recipe.train.source != "rollout":
            return own.engines, None
        made = [chosen(recipe, replace(own, engines=engines)) for engines in self._choices]
        found = policies(made, self._subject.model, self._deadline)
        for engines, kind in zip(self._choices, found, strict=True):
            rank = rank_of(kind, self._subject.device.memory, self._libraries(recipe).communicators.get("rollout", 0))
            if rank is not None and too_small(kind, rank, self._subject.device.memory) is None:
                self._not_counted = not_counted(kind, self._subject.device.memory)
                return engines, rank
        if all(kind.counts is None for kind in found):
            self._not_counted = not_counted(found[0], self._subject.device.memory)
            return own.engines, None
        raise InputError(
            f"Of {pluralize(len(found), 'way')} to lay out engines, the fastest by their estimates, none has room for a sequence of the "
            "longest length: give rollout.engine_args another share of the device, or use more devices."
        )

    def _stages_of_critic(self) -> list[Stage]:
        recipe, model = self._subject.recipe, self._subject.critic_model
        if model is None:
            return []
        view = replace(recipe, critic=replace(recipe.critic, model_path=None))
        built = built_from(view, model, self._directory / "critic")
        return stages_of("critic", built, recipe.critic.megatron, self._client)


def covering(counted: list[Stage], stages: int) -> list[Stage]:
    """As many `stages` as a pipeline has, each with the most that any of `counted` holds, part by part."""
    names = [one.name for one in fields(RankMemory)]
    most = RankMemory(**{name: max(getattr(stage.held, name) for stage in counted) for name in names})
    return [replace(counted[0], number=number, held=most) for number in range(stages)]


def too_large(subject: Subject, choice: Choice) -> bool:
    """By arithmetic alone."""
    recipe = chosen(subject.recipe, choice)
    if _stays(choice, recipe) and _resident(recipe, subject.shape) + subject.taken > subject.limit:
        return True
    return at_least(recipe, subject.shape) > subject.limit


def _stays(choice: Choice, recipe: Recipe) -> bool:
    """Whether trainers keep what they hold on the device while engines sample there."""
    return _shared(recipe) and recipe.train.source == "rollout" and not choice.offload


def _resident(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes that trainers hold at least."""
    return max(held_at_least(recipe, shape, part) for part in parts(recipe, shape))


def _shared(recipe: Recipe) -> bool:
    return recipe.cluster.placement == "colocated"
