"""`cluster.elastic`: choose the layout of a run that goes on, by the free devices of its cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from megarl import platform as platforms
from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.journal import newest_step
from megarl.cluster import transport, watching_devices
from megarl.cluster.device_map import Demand, Machines, fits
from megarl.cluster.elastic_layout import ElasticLayouts, LayoutSizes, model_parallel
from megarl.errors import NotHereError, RecipeError, pluralize
from megarl.observe.restarts import restart_cause
from megarl.observe.run_dir import RunDirectory
from megarl.platform.kinds import kind_of
from megarl.preflight.engines_and_devices import demand_of
from megarl.recipe.schema import Recipe

KEY = "cluster.elastic"
_LOOK_SECONDS = 1.0  # between two looks at the cluster while a start waits


def may_shrink(recipe: Recipe) -> bool:
    """Return whether a start of `recipe` may take a smaller layout: it goes on with an earlier start of the run.

    The first start must have all devices, since a wrong number of machines is the likely cause if it has not. A replay repeats a
    recorded layout.
    """
    if not recipe.cluster.elastic or recipe.train.replay is not None or recipe.train.resume == "never":
        return False
    if restart_cause() or recipe.train.resume != "auto":
        return True
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    return bool(list_checkpoints(directory.checkpoints)) or (
        recipe.train.journal and newest_step(directory.journal) is not None
    )


def least_devices(recipe: Recipe) -> int:
    """Return the number of devices of the smallest layout that a run of `recipe` goes on with."""
    layouts = ElasticLayouts(recipe, demand_of(recipe))
    return layouts.demand(layouts.least).devices


def fit_to_devices(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return `recipe` in the layout that this start takes, and a notice if it is a smaller one (`cluster.elastic`).

    Waits `cluster.elastic_wait` seconds for the devices of the recipe. Raises RecipeError if not even the smallest layout fits,
    and ValueError if the cluster cannot be joined.
    """
    if recipe.cluster.elastic and transport(recipe.cluster) != "ray":
        problem = "torchrun starts a fixed number of trainers (--nproc-per-node)"
        raise RecipeError(KEY, problem, "leave it out, or start the run without torchrun", value=True)
    if not may_shrink(recipe):
        return recipe, []
    kind = kind_of(platforms.kind(recipe.cluster.device))
    layouts = ElasticLayouts(recipe, demand_of(recipe))
    has_devices = kind.ray_resource is not None
    with watching_devices(recipe.cluster, kind) as (look, may_join):
        machines = _wait(layouts, look, has_devices, recipe.cluster.elastic_wait if may_join else 0.0)
    if machines is None:
        return recipe, []
    sizes = layouts.choose(lambda demand: _fits(machines, demand, has_devices))
    if sizes is None:
        raise _too_few(recipe, layouts, machines)
    return layouts.recipe(sizes), [_notice(layouts, sizes, machines)]


def _wait(
    layouts: ElasticLayouts, look: Callable[[], Machines | None], has_devices: bool, seconds: float
) -> Machines | None:
    """Wait until the recipe's layout fits. Returns None then, and after `seconds` the machines that are there."""
    deadline, full, printed = time.monotonic() + seconds, layouts.demand(layouts.full), False
    while True:
        machines = look()
        if machines is None or _fits(machines, full, has_devices):
            return None
        if time.monotonic() >= deadline:
            return machines
        if not printed:
            print(
                f"waiting for devices, {seconds:.0f} s at most (cluster.elastic_wait): the recipe needs {full.devices}, and "
                f"{_free_text(machines)}",
                file=sys.stderr,
                flush=True,
            )
            printed = True
        time.sleep(_LOOK_SECONDS)


def _fits(machines: Machines, demand: Demand, has_devices: bool) -> bool:
    """Return whether the machines hold `demand`. Processes that need no device only have a number of CPUs in all."""
    free = [count for _, count in machines]
    return fits(free, demand) if has_devices else demand.devices <= sum(free)


def _free_text(machines: Machines) -> str:
    total = sum(count for _, count in machines)
    places = ", ".join(f"{count} on {name}" for name, count in machines) or "no machine"
    return f"{total} {'is' if total == 1 else 'are'} free ({places})"


def _notice(layouts: ElasticLayouts, sizes: LayoutSizes, machines: Machines) -> str:
    demand = layouts.demand(sizes)
    settings = [f"cluster.trainers={demand.trainers}"]
    settings += [f"critic.trainers={demand.critics}"] if demand.critics else []
    settings += [f"rollout.engines={sizes.engines}"] if sizes.engines else []
    smaller = sizes.replicas < layouts.full.replicas
    memory = f". Each replica then holds a larger part of the optimizer: see megarl plan RECIPE {' '.join(settings)}"
    return (
        f"the recipe needs {layouts.demand(layouts.full).devices} devices, and {_free_text(machines)}: this start goes on with "
        f"{layouts.text(sizes)} instead of {layouts.text(layouts.full)} (cluster.elastic). Batch and loss stay the same, and a step takes "
        f"longer{memory if smaller else ''}. The next start with all devices has the recipe's layout again"
    )


def _too_few(recipe: Recipe, layouts: ElasticLayouts, machines: Machines) -> NotHereError:
    demand, megatron, rollout = layouts.demand(layouts.least), recipe.megatron, recipe.rollout
    parts = [
        f"{pluralize(layouts.least.replicas, 'replica')} of megatron.tensor_parallel x pipeline_parallel x context_parallel = "
        f"{megatron.tensor_parallel} x {megatron.pipeline_parallel} x {megatron.context_parallel} = {model_parallel(megatron)}"
    ]
    parts += [f"critic.trainers = {demand.critics}"] if demand.critics else []
    parts += (
        [f"rollout.engines x rollout.tensor_parallel = {demand.engines} x {rollout.tensor_parallel}"]
        if demand.engines
        else []
    )
    parts += [str(kind) for kind in demand.fixed]
    shared = ", on the same devices" if demand.shared else ""
    problem = (
        f"the smallest layout needs {pluralize(demand.devices, 'device')} ({'; '.join(parts)}{shared}), and the run finds too few: "
        f"{_free_text(machines)}"
    )
    least = "lower rollout.min_engines, " if rollout.min_engines else ""
    remedy = (
        f"add machines, free devices, {least}or lower the parallel sizes in megatron (a checkpoint loads in any layout)"
    )
    return NotHereError(KEY, problem, remedy, value=True)
