"""Layouts that a model, a number of devices and their machines allow: the candidates of `plan --search`. Pure.

No rule is repeated here: each layout passes the checks of a run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from megarl.batching.limits import samples_together
from megarl.cluster.device_map import Demand
from megarl.engines import check_groups
from megarl.errors import plain
from megarl.hf.config import number_of_experts, text_fields
from megarl.megatron.extra_settings import check_extra
from megarl.megatron.layout import check_layout, uneven_stages
from megarl.megatron.lora.targets import check_lora
from megarl.preflight.engines import check_experts, check_heads
from megarl.preflight.recipe.general import validate
from megarl.preflight.recipe.shared import parallel_size_errors
from megarl.recipe.derived.lengths import longest_sample
from megarl.recipe.derived.offload import offloads
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from fast and large to slow and small


@dataclass(frozen=True)
class TrainerLayout:
    """Parallel layout of the trainers, with the recipe's names."""

    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    virtual_pipeline: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parallel sizes, without the distribution of layers over stages."""
        return tuple(vars(self).values())[:5]


@dataclass(frozen=True)
class EngineLayout:
    """Parallel layout of the policy's engines, with the recipe's names."""

    engines: int
    tensor_parallel: int
    data_parallel: int
    expert_parallel: bool | None


@dataclass(frozen=True)
class Choice:
    """One candidate: everything that a search varies in a recipe."""

    layout: TrainerLayout
    recompute: Recompute
    offload: bool
    tokens: int  # actor.max_tokens_per_micro_batch
    engines: EngineLayout


VARIED = (
    "megatron.tensor_parallel",
    "megatron.sequence_parallel",
    "megatron.pipeline_parallel",
    "megatron.virtual_pipeline",
    "megatron.first_stage_layers",
    "megatron.last_stage_layers",
    "megatron.context_parallel",
    "megatron.expert_parallel",
    "megatron.expert_tensor_parallel",
    "megatron.recompute",
    "megatron.offload",
    "actor.max_tokens_per_micro_batch",
    "rollout.engines",
    "rollout.tensor_parallel",
    "rollout.data_parallel",
    "rollout.expert_parallel",
)
"""Recipe keys that a search may change."""


def choice_of(recipe: Recipe) -> Choice:
    megatron, rollout = recipe.megatron, recipe.rollout
    sizes = {part.name: getattr(megatron, part.name) for part in fields(TrainerLayout)}
    layout = TrainerLayout(**{**sizes, "expert_tensor_parallel": megatron.expert_tensor_parallel or 1})
    engines = EngineLayout(**{part.name: getattr(rollout, part.name) for part in fields(EngineLayout)})
    return Choice(layout, megatron.recompute, offloads(recipe), recipe.actor.max_tokens_per_micro_batch, engines)


def apply_choice(recipe: Recipe, choice: Choice) -> Recipe:
    """Return `recipe` with the layout of `choice`."""
    # An unset key stays unset if its default equals the choice.
    offload = recipe.megatron.offload if choice.offload == offloads(recipe) else choice.offload
    megatron = replace(_laid_out(recipe.megatron, choice.layout), recompute=choice.recompute, offload=offload)
    return replace(
        recipe,
        megatron=megatron,
        actor=replace(recipe.actor, max_tokens_per_micro_batch=choice.tokens),
        rollout=with_engines(recipe, choice.engines).rollout,
    )


def overrides(recipe: Recipe, changed: Recipe, keys: Sequence[str] = VARIED) -> list[str]:
    """Return the command-line settings of `keys` that turn `recipe` into `changed`."""
    return [
        f"{key}={plain(_value(changed, key))}".replace("'", "")
        for key in keys
        if _value(changed, key) != _value(recipe, key)
    ]


def refusal(recipe: Recipe, model: dict[str, Any]) -> str | None:
    """Return the error of a run with this layout, or None. `model`: config.json."""
    try:
        require_valid(recipe, model)
    except ValueError as error:
        return str(error)
    return None


def require_valid(recipe: Recipe, model: dict[str, Any]) -> None:
    """Raise ValueError, often a RecipeError, if a run would refuse this layout. `model`: config.json."""
    validate(recipe)
    check_layout(model, recipe.megatron, recipe.cluster.trainers)
    check_lora(model, recipe.lora, recipe.megatron)
    check_extra(recipe, model, "megatron")
    if recipe.train.source == "rollout":
        _check_engines(recipe, model)


# --- trainers ------------------------------------------------------------------------------------


def layouts(recipe: Recipe, model: dict[str, Any], per_node: int) -> Iterator[TrainerLayout]:
    """Yield every layout of `recipe.cluster.trainers` processes that divides `model` (config.json).

    `per_node`: devices per machine; a tensor-parallel group stays in one machine. Pipeline stages are as even as possible;
    if layers do not divide, the first and the last stage have fewer.
    """
    trainers, text = recipe.cluster.trainers, text_fields(model)
    layers = text["num_hidden_layers"]
    for tensor, pipeline, context in _three(trainers, per_node, layers):
        stage = trainers // pipeline
        cuts = list(_pipelines(recipe.megatron, layers, pipeline))
        if not any(_divides(recipe, model, TrainerLayout(tensor, pipeline, context, 1, 1, *cut)) for cut in cuts):
            continue
        for expert, expert_tensor in _experts(number_of_experts(text), stage):
            for cut in cuts:
                layout = TrainerLayout(tensor, pipeline, context, expert, expert_tensor, *cut)
                if _divides(recipe, model, layout):
                    yield layout


def _three(trainers: int, per_node: int, layers: int) -> Iterator[tuple[int, int, int]]:
    for pipeline in divisors(trainers):
        if pipeline <= layers:
            for tensor in divisors(trainers // pipeline):
                if tensor <= per_node:
                    for context in divisors(trainers // pipeline // tensor):
                        yield tensor, pipeline, context


def _pipelines(
    megatron: MegatronConfig, layers: int, stages: int
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Yield (virtual_pipeline, first_stage_layers, last_stage_layers) for `stages` stages, the recipe's first."""
    current = megatron.virtual_pipeline, megatron.first_stage_layers, megatron.last_stage_layers
    cuts = [current] if stages == megatron.pipeline_parallel else []
    if stages == 1:
        cuts.append((None, None, None))
    else:
        for chunks in divisors(layers):
            if layers // chunks >= stages:
                cuts += [
                    (chunks if chunks > 1 else None, first and first * chunks, last and last * chunks)
                    for first, last in uneven_stages(layers // chunks, stages)
                ]
    yield from dict.fromkeys(cuts)


def _experts(experts: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yield (expert_parallel, expert_tensor_parallel) for a pipeline stage of `stage` processes."""
    for expert in divisors(stage) if experts else [1]:
        for tensor in divisors(stage // expert) if experts else [1]:
            yield expert, tensor


def _divides(recipe: Recipe, model: dict[str, Any], layout: TrainerLayout) -> bool:
    megatron = _laid_out(recipe.megatron, layout)
    if any(parallel_size_errors("cluster.trainers", recipe.cluster.trainers, "megatron", megatron)):
        return False
    try:
        check_layout(model, megatron, recipe.cluster.trainers)
    except ValueError:
        return False
    return True


def _laid_out(megatron: MegatronConfig, layout: TrainerLayout) -> MegatronConfig:
    changed = replace(megatron, **vars(layout))
    if layout.tensor_parallel == 1 and megatron.sequence_parallel:
        changed.sequence_parallel = None
    if layout.expert_tensor_parallel == (megatron.expert_tensor_parallel or 1):
        changed.expert_tensor_parallel = megatron.expert_tensor_parallel  # an unset key stays unset
    return changed


def sizes_of_micro_batches(recipe: Recipe, layout: TrainerLayout) -> list[int]:
    """Return the micro batch sizes to try, in tokens per device: the recipe's, and one, two, four and eight sequences of
    the longest length, or as many groups that must stay together. Smaller ones change nothing, since a longer one runs alone."""
    longest = samples_together(recipe) * longest_sample(recipe)
    part = -(-longest // layout.context_parallel)
    current = recipe.actor.max_tokens_per_micro_batch
    return sorted({*(part << doubling for doubling in range(4)), *([current] if current >= part else [])})


# --- engines -------------------------------------------------------------------------------------


def engine_layouts(recipe: Recipe, model: dict[str, Any], per_node: int) -> Iterator[EngineLayout]:
    """Yield every engine layout of the engines' devices; only the recipe's if nothing is sampled."""
    current = choice_of(recipe).engines
    if recipe.train.source != "rollout":
        yield current
        return
    text = text_fields(model)
    colocated = recipe.cluster.placement == "colocated"
    devices = recipe.cluster.trainers if colocated else current.engines * current.tensor_parallel
    candidates = [current]
    for tensor in divisors(devices):
        if tensor > per_node:
            continue
        for group in divisors(devices // tensor):
            spread = (None, True) if group == 1 and number_of_experts(text) else (None,)
            candidates += [EngineLayout(devices // tensor, tensor, group, experts) for experts in spread]
    yield from (engines for engines in dict.fromkeys(candidates) if _can_be(recipe, model, engines))


def _can_be(recipe: Recipe, model: dict[str, Any], engines: EngineLayout) -> bool:
    try:
        _check_engines(with_engines(recipe, engines), model)
    except ValueError:
        return False
    return True


def _check_engines(recipe: Recipe, model: dict[str, Any]) -> None:
    """Raise ValueError if a run would refuse the recipe's engines."""
    rollout = recipe.rollout
    check_groups(rollout.engine, rollout.data_parallel)
    check_experts(rollout, model)
    check_heads("rollout", rollout, model, spread=rollout.spreads_experts)
    Demand.of(recipe, trainers=True, engines=True).require_trainers_devices_suffice()


def with_engines(recipe: Recipe, engines: EngineLayout) -> Recipe:
    return replace(recipe, rollout=replace(recipe.rollout, **vars(engines)))


@cache
def divisors(number: int) -> tuple[int, ...]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(number // divisor for divisor in low)}))


def _value(recipe: Recipe, key: str) -> Any:
    return operator.attrgetter(key)(recipe)
