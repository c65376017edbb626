"""How the controller reaches trainers and engines: over Ray, or inside one torchrun.

>>> if cluster.is_controller(recipe):
...     with cluster.connect(recipe, platform) as processes:
...         trainers = processes.start_trainers("megarl.trainer.actor:ActorWorker", 2, (recipe, 100), env={})
... else:
...     cluster.serve(recipe)

Imports neither Ray nor torch until `connect`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.base import Cluster, Service, WorkerGroup, host_name
from megarl.cluster.device_map import Demand
from megarl.cluster.failures import CallFailed, ClusterError, ServiceDied, WorkerFailed
from megarl.platform.environment import RoleSettings
from megarl.recipe.environment import variables
from megarl.recipe.schema import Recipe

if TYPE_CHECKING:
    from megarl.platform.base import Platform

__all__ = [
    "CallFailed",
    "Cluster",
    "ClusterError",
    "Service",
    "ServiceDied",
    "WorkerFailed",
    "WorkerGroup",
    "connect",
    "host_name",
    "is_controller",
    "log_dir",
    "serve",
    "trainer_notices",
    "transport",
]


def transport(recipe: Recipe) -> str:
    """ "ray" or "torchrun": what ``cluster.transport`` says, auto resolved by whether torchrun started this process."""
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if recipe.cluster.transport == "torchrun" and not under_torchrun:
        raise ValueError(
            "cluster.transport is torchrun, and this process was not started by it (RANK and WORLD_SIZE are not set): "
            f"run torchrun --nproc-per-node {recipe.cluster.trainers} -m megarl train ..., or set cluster.transport=ray."
        )
    if recipe.cluster.transport == "auto":
        return "torchrun" if under_torchrun else "ray"
    return recipe.cluster.transport


def is_controller(recipe: Recipe) -> bool:
    """False in torchrun's ranks other than 0: these `serve`."""
    from megarl.cluster.torchrun import rank

    return transport(recipe) == "ray" or rank.is_controller()


def log_dir(recipe: Recipe) -> Path:
    """Where the processes of a run write their output."""
    return Path(recipe.runs_dir).absolute() / recipe.name / "logs"


def serve(recipe: Recipe) -> None:
    """Answer the controller's calls until it is done."""
    from megarl.cluster.torchrun import rank

    rank.serve(log_dir(recipe))


def trainer_settings(recipe: Recipe, platform: Platform) -> RoleSettings:
    """The environment of trainers, by who decides each variable."""
    own = platform.trainer_env(recipe.cluster.timeout)
    own |= platform.deterministic_env() if recipe.train.deterministic else {}
    return RoleSettings("trainers", own, variables(recipe, "trainers"))


def trainer_notices(recipe: Recipe, platform: Platform) -> list[str]:
    """Notices of variables of trainers that the shell of this command has otherwise, of those that the recipe sets, and of what
    the installation lacks. Raises RecipeError for a variable of `cluster.environment` with which trainers would be wrong."""
    settings = trainer_settings(recipe, platform)
    computed = [f"trainers have {name}={value}: {why}" for name, value, why in settings.computed()]
    return [*platform.installation_notices(), *settings.notices(), *computed]


def connect(
    recipe: Recipe,
    platform: Platform,
    *,
    trainers: bool = True,
    engines: bool | None = None,
    critic: bool = False,
    fixed: Sequence[str] = (),
) -> Cluster:
    """The cluster that the recipe asks for; nothing of ours runs on it yet.

    trainers, engines, critic: whether these will be started, and so need devices; engines None: where the
    recipe trains on rollouts. fixed: the recipe's sections (teacher, judge) whose engines will be started after these.
    Raises ValueError, with the remedy, where there is no such cluster, where it was not started as the
    recipe expects, and where it has not the devices.
    """
    demand = Demand.of(
        recipe,
        trainers=trainers,
        engines=recipe.train.source == "rollout" if engines is None else engines,
        critic=critic,
        fixed=fixed,
    )
    if platform.ray_resource is not None:  # on a CPU there are no devices to run out of
        demand.require_trainers_devices_suffice()
    threads = {"OMP_NUM_THREADS": str(recipe.cluster.threads)}
    role_env = {
        "trainer_env": threads | trainer_settings(recipe, platform).environment(),
        "service_env": threads
        | RoleSettings(
            "engines", platform.engines_env(recipe.train.deterministic), variables(recipe, "engines")
        ).environment(),
    }
    if transport(recipe) == "torchrun":
        from megarl.cluster.devices import LocalDevices
        from megarl.cluster.torchrun.cluster import TorchrunCluster

        engines_first = 0 if demand.shared else demand.trainers
        fixed_first = demand.trainers if demand.shared else demand.trainers + demand.engine_devices
        numbers = [*range(engines_first, engines_first + demand.engine_devices)]
        numbers += range(fixed_first, fixed_first + demand.fixed_devices)
        local = LocalDevices(platform.visible_devices_env, numbers)
        return TorchrunCluster(recipe.cluster.trainers if trainers else None, log_dir(recipe), local, **role_env)
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            f"cluster.transport is {recipe.cluster.transport}, which here means Ray, and Ray is not installed: pip install "
            f"ray, or start with torchrun --nproc-per-node {recipe.cluster.trainers} -m megarl ... on one machine."
        )
    from megarl.cluster.ray import env

    address = recipe.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    env.prepare(private=not address)
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    devices = RayDevices(platform.ray_resource, platform.visible_devices_env, demand)
    return RayCluster(address, devices, log_dir(recipe), **role_env)
