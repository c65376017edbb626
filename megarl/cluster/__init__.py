"""Start and reach trainers and engines from the controller: over Ray, or inside one torchrun.

>>> if cluster.is_controller(recipe.cluster):
...     with cluster.connect(recipe, platform) as processes:
...         trainers = processes.start_trainers("megarl.trainer.actor:ActorWorker", 2, (recipe, 100))
... else:
...     cluster.serve(recipe)

Imports neither Ray nor torch until `connect`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.cluster.base import Cluster, Service, WorkerGroup, host_name
from megarl.cluster.device_map import Demand, Machines
from megarl.cluster.failures import CallFailed, ClusterError, ServiceDied, WorkerFailed
from megarl.cluster.keeper import KeeperAddress
from megarl.platform.base import Platform
from megarl.platform.device_kind import DeviceKind
from megarl.platform.environment import RoleSettings
from megarl.recipe.environment import variables
from megarl.recipe.schema import ClusterConfig, Recipe

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
    "watching_devices",
]


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def transport(cluster: ClusterConfig) -> str:
    """Return "ray" or "torchrun": ``cluster.transport``, with auto resolved by whether torchrun started this process."""
    if cluster.transport == "torchrun" and not under_torchrun():
        raise ValueError(
            "cluster.transport is torchrun, but torchrun did not start this process (RANK and WORLD_SIZE are not set): "
            f"run torchrun --nproc-per-node {cluster.trainers} -m megarl train ..., or set cluster.transport=ray."
        )
    if cluster.transport == "auto":
        return "torchrun" if under_torchrun() else "ray"
    return cluster.transport


def is_controller(cluster: ClusterConfig) -> bool:
    """Return False in torchrun ranks other than 0, which call `serve`."""
    from megarl.cluster.torchrun import rank

    return transport(cluster) == "ray" or rank.is_controller()


def log_dir(recipe: Recipe) -> Path:
    """Directory of the output files of a run's processes."""
    return Path(recipe.runs_dir).absolute() / recipe.name / "logs"


def serve(recipe: Recipe) -> None:
    """Serve the controller's calls until the run ends."""
    from megarl.cluster.torchrun import rank

    rank.serve(log_dir(recipe))


def trainer_settings(recipe: Recipe, platform: Platform) -> RoleSettings:
    """Environment variables of the trainers, with the source of each (platform or recipe)."""
    defaults = platform.trainer_env(recipe.cluster.timeout)
    defaults |= platform.deterministic_env() if recipe.train.deterministic else {}
    return RoleSettings("trainers", defaults, variables(recipe.cluster.environment, "trainers"))


def trainer_notices(recipe: Recipe, platform: Platform) -> list[str]:
    """Notices about missing packages, and about trainer variables that the recipe sets, differ from this shell or lose a setting.

    Raises RecipeError for a variable of `cluster.environment` that would break the trainers.
    """
    settings = trainer_settings(recipe, platform)
    computed = [f"trainers have {name}={value}: {why}" for name, value, why in settings.computed()]
    notices = [*platform.kind.installation_notices(), *settings.notices(), *computed]
    if recipe.weight_sync.transport == "ipc" and (lost := platform.shared_bucket_notice(settings.environment())):
        notices.append(lost)
    return notices


def connect(recipe: Recipe, platform: Platform, demand: Demand | None = None) -> Cluster:
    """Connect to the recipe's cluster and reserve its devices; no process is started yet.

    demand: the processes that the caller will start; None: trainers, and engines if the recipe trains on rollouts.
    Raises ValueError, with the remedy, if the cluster cannot be reached, was started differently from what the
    recipe expects, or has too few devices.
    """
    if demand is None:
        demand = Demand.of(recipe, trainers=True, engines=recipe.train.source == "rollout")
    if platform.kind.ray_resource is not None:  # CPU processes need no devices
        demand.require_trainers_devices_suffice()
    threads = {"OMP_NUM_THREADS": str(recipe.cluster.threads)}
    trainer_env = threads | trainer_settings(recipe, platform).environment()
    if transport(recipe.cluster) == "torchrun":
        if recipe.train.trainer_restarts:
            raise ValueError(
                "train.trainer_restarts needs Ray: torchrun ends all its processes when one of them has failed. Set it to 0 and "
                "use torchrun --max-restarts, or start the run without torchrun."
            )
        from megarl.cluster.devices import LocalDevices
        from megarl.cluster.torchrun.cluster import TorchrunCluster

        engines_first = 0 if demand.shared else demand.trainers
        fixed_first = demand.trainers if demand.shared else demand.trainers + demand.engine_devices
        numbers = [*range(engines_first, engines_first + demand.engine_devices)]
        numbers += range(fixed_first, fixed_first + demand.fixed_devices)
        local = LocalDevices(platform.kind.visible, numbers)
        return TorchrunCluster(
            demand.trainers or None, log_dir(recipe), local, trainer_env=trainer_env, stall=recipe.cluster.stall
        )
    address = _ray_address(recipe.cluster)
    keeper = KeeperAddress.of_environment(os.environ)
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    devices = RayDevices(platform.kind.ray_resource, platform.kind.visible, demand)
    return RayCluster(
        address, devices, log_dir(recipe), trainer_env=trainer_env, stall=recipe.cluster.stall, keeper=keeper
    )


@contextlib.contextmanager
def watching_devices(cluster: ClusterConfig, kind: DeviceKind) -> Iterator[tuple[Callable[[], Machines | None], bool]]:
    """Yield a function that returns the free devices of a run's Ray cluster, and whether machines may join it.

    The function returns None if processes need no devices and all run on this machine. Starts no process; an existing cluster is
    joined within the block. Raises ValueError as `connect` does.
    """
    address, resource = _ray_address(cluster), kind.ray_resource
    if not address and resource is None:
        yield lambda: None, False
        return
    from megarl.cluster.ray.free_devices import count_here, watching

    if address:
        with watching(address, resource) as machines:
            yield machines, True
    else:
        assert resource is not None
        local = [(host_name(), count_here(resource))]
        yield lambda: local, False


def _ray_address(cluster: ClusterConfig) -> str | None:
    """Return the address of the Ray cluster to join, None for a private one, and set the variables that Ray reads at import.

    Raises ValueError if Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            f"cluster.transport is {cluster.transport}, which resolves to Ray, and Ray is not installed: pip install "
            f"ray, or start with torchrun --nproc-per-node {cluster.trainers} -m megarl ... on one machine."
        )
    address = cluster.ray_address or os.environ.get("RAY_ADDRESS")
    from megarl.cluster.ray import env

    env.prepare(private=not address)
    return address
