"""Checks of engines, devices and user functions: they need the machine and its packages, but no weights and no data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from megarl import engines
from megarl import platform as platforms
from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import needs_teacher
from megarl.cluster.device_map import Demand
from megarl.engines.routes import check_route, route_here
from megarl.engines.specs import first_specs, fixed_models
from megarl.errors import RecipeError, errors_of, pluralize
from megarl.hf.shape import model_shape
from megarl.megatron.extra_settings import check_extra_names
from megarl.platform.kinds import kind_of
from megarl.preflight.engines import check_engine, check_engines
from megarl.preflight.recipe.observe import check_traces
from megarl.preflight.user_functions import try_user_functions
from megarl.recipe.data import DataConfig
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import ClusterConfig, Recipe


def only_evaluates(data: DataConfig) -> bool:
    """Return whether the recipe has evaluation data and no training data."""
    return not data.train_files and not data.mix and bool(data.eval_files)


def demand_of(recipe: Recipe) -> Demand:
    """Return the devices that `train` needs, or `eval` if the recipe has no training data."""
    trains, uses_rollout = not only_evaluates(recipe.data), recipe.train.source == "rollout"
    fixed = fixed_models(recipe, training=trains)
    critic = trains and uses_critic(recipe.algorithm)
    return Demand.of(recipe, trainers=trains, engines=uses_rollout, critic=critic, fixed=fixed)


def training_setting_errors(recipe: Recipe) -> Iterator[ValueError]:
    """Yield errors of engines, Megatron's settings, user functions and devices, for `train`."""
    if not recipe.data.train_files and not recipe.data.mix:
        problem = "the recipe has no training data"
        yield RecipeError("data.train_files", problem, "name .parquet or .jsonl files", value=[])
    yield from errors_of(check_engines, recipe.rollout)
    if needs_teacher(recipe.algorithm):
        yield from errors_of(check_engine, "teacher", recipe.teacher)
    if recipe.asks_judge:
        yield from errors_of(check_engine, "judge", recipe.judge)
    yield from errors_of(check_extra_names, recipe, "megatron")
    if uses_critic(recipe.algorithm):
        yield from errors_of(check_extra_names, critic_view(recipe), "critic.megatron")
    yield from errors_of(try_user_functions, recipe.algorithm)
    yield from device_count_errors(recipe.cluster, demand_of(recipe))


def device_count_errors(cluster: ClusterConfig, demand: Demand) -> Iterator[ValueError]:
    """Yield an error if trainers and colocated engines of `demand` need different numbers of devices. CPU processes share cores."""
    if kind_of(platforms.kind(cluster.device)).ray_resource is not None:
        yield from errors_of(demand.require_trainers_devices_suffice)


def unused_devices_notice(recipe: Recipe, *, accelerated: bool) -> str | None:
    """Return a notice if colocated engines leave devices without an engine that one more engine, or group, could use.

    accelerated: the devices are accelerators. Processes on CPUs share the cores.
    """
    rollout, trainers = recipe.rollout, recipe.cluster.trainers
    demand = demand_of(recipe)
    unused, added = trainers - demand.engine_devices, rollout.tensor_parallel * rollout.data_parallel
    if not demand.shared or not demand.engines or unused < added or not accelerated:
        return None
    most = rollout.engines + unused // added * rollout.data_parallel
    return (
        f"{unused} of {pluralize(trainers, 'device')} have no engine (rollout.engines x rollout.tensor_parallel = {rollout.engines} x "
        f"{rollout.tensor_parallel}) and wait while the others sample: rollout.engines={most} would use {most * rollout.tensor_parallel}"
    )


def evaluation_setting_errors(recipe: Recipe) -> Iterator[ValueError]:
    """Yield errors of the data source and of engines, for `eval`."""
    if recipe.train.source != "rollout":
        yield RecipeError(
            "train.source",
            "`megarl eval` samples responses and scores them, but rows of this source only have a loss",
            "set evaluation.at_start or at_end to compute the loss during training, or use an RL recipe",
            value=recipe.train.source,
        )
        return
    if not recipe.data.eval_files:
        problem = "the recipe has no evaluation data"
        yield RecipeError("data.eval_files", problem, "name .parquet or .jsonl files", value=[])
    if recipe.lora.rank and recipe.lora.path:
        problem = "`megarl eval` samples from model.path alone, without adapters"
        remedy = "set lora.path=null, and model.path to a merged model (`megarl export`, or PEFT's merge_and_unload)"
        yield RecipeError("lora.path", problem, remedy, value=recipe.lora.path)
    yield from errors_of(check_engines, recipe.rollout)
    if recipe.asks_judge:
        yield from errors_of(check_engine, "judge", recipe.judge)


def check_device(recipe: Recipe, device: str, *, training: bool = True) -> None:
    """Raise RecipeError for settings that the engines and the profiler of `device` do not support.

    `training`: False for `megarl eval`.
    """
    if training:
        check_traces(recipe.observe, kind_of(device))
    for engine, spec in first_specs(recipe, training=training):
        arguments = engines.arguments_of(engine)
        arguments.check_plan(spec, device)
        only_adapters = recipe.weight_sync.adapters == "only" and spec.adapters is not None
        if only_adapters and (reason := arguments.merged_because(spec, device)) is not None:
            raise RecipeError("weight_sync.adapters", reason, "set weight_sync.adapters=merged, or auto", value="only")


def check_installed(recipe: Recipe, *, training: bool = True) -> None:
    """Raise RecipeError if the package of an engine that will start on this machine is missing.

    A Ray cluster's nodes are not examined: they may have other packages than the controller. `megarl doctor` examines them.
    `training`: False for `megarl eval`.
    """
    if recipe.cluster.ray_address or os.environ.get("RAY_ADDRESS"):
        return
    for engine, spec in first_specs(recipe, training=training):
        if engines.package_folder(engine) is None:
            raise RecipeError(
                f"{spec.recipe_section}.engine",
                f"the package {engine} is not installed in {sys.prefix}",
                "install it (`megarl doctor RECIPE` names the version), or choose another engine",
                value=engine,
            )


def route_notices(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """Return a notice if `weight_sync.route=auto` selects full, with the bytes sent. `config`: the policy's config.json.

    Raises RecipeError for a route that the engines of this environment do not support.
    """
    if recipe.train.source != "rollout":
        return []
    route = route_here(recipe)
    check_route(recipe, route, config)
    if route.name != "full" or recipe.weight_sync.route != "auto":
        return []
    ranks, size = recipe.rollout.engines * recipe.rollout.tensor_parallel, model_shape(config).total
    size *= 4 if recipe.model.dtype == "float32" else 2
    moved = f"each of {pluralize(ranks, 'engine rank')} receives the whole model, {size / 2**30:,.1f} GiB an update"
    return [f"weight_sync.route=auto selects {route}; {moved}, from rank 0 (plan RECIPE estimates the seconds)"]
