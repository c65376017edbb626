"""How the controller reaches trainers and engines: over Ray, or inside one torchrun.

>>> if cluster.is_controller(recipe):
...     with cluster.connect(recipe, platform) as processes:
...         trainers = processes.start_trainers("megarl.worker:TrainerWorker", 2, (recipe, 100), env={})
... else:
...     cluster.serve(recipe)

Imports neither Ray nor torch until `connect`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.base import Cluster, Service, WorkerGroup, host_name
from megarl.cluster.failures import CallFailed, ClusterError, ServiceDied, WorkerFailed
from megarl.config.schema import Recipe

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
    from megarl.cluster import torchrun

    return transport(recipe) == "ray" or torchrun.is_controller()


def log_dir(recipe: Recipe) -> Path:
    """Where the processes of a run write their output."""
    return Path(recipe.runs_dir).absolute() / recipe.name / "logs"


def serve(recipe: Recipe) -> None:
    """Answer the controller's calls until it is done."""
    from megarl.cluster import torchrun

    torchrun.serve(log_dir(recipe))


def connect(recipe: Recipe, platform: Platform) -> Cluster:
    """The cluster that the recipe asks for; nothing of ours runs on it yet.

    Raises ValueError where there is no such cluster, or where it was not started as the recipe expects.
    """
    colocated = recipe.cluster.placement == "colocated"
    threads = {"OMP_NUM_THREADS": str(recipe.cluster.threads)}
    trainer_env, service_env = threads | platform.trainer_env(), threads | platform.rollout_env()
    if transport(recipe) == "torchrun":
        from megarl.cluster.devices import LocalDevices
        from megarl.cluster.torchrun import TorchrunCluster

        devices = LocalDevices(platform.visible_devices_env, 0 if colocated else recipe.cluster.trainers)
        return TorchrunCluster(log_dir(recipe), devices, trainer_env=trainer_env, service_env=service_env)
    from megarl.cluster import ray_env

    address = recipe.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    ray_env.prepare(private=not address)
    from megarl.cluster.ray_cluster import RayCluster
    from megarl.cluster.ray_devices import RayDevices

    return RayCluster(
        address,
        RayDevices(platform.ray_resource, platform.visible_devices_env, shared=colocated),
        log_dir(recipe),
        trainer_env=trainer_env,
        service_env=service_env,
    )
