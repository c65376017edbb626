"""Weight-sync route that a recipe will take with a device's software versions."""

from __future__ import annotations

from dataclasses import replace

from megarl.commands.plan.environment import device_kind
from megarl.engines.routes import WeightRoute, route_here, route_of, routes_of_sets
from megarl.engines.vllm.route_support import installed_support
from megarl.platform.device_table import Device
from megarl.platform.kinds import kind_of
from megarl.recipe.derived.weight_sync_route import is_sharded
from megarl.recipe.schema import Recipe


def expected_routes(recipe: Recipe, device: Device | None) -> list[WeightRoute]:
    """Return the expected route first, then the routes with the device's other version sets. If this machine has such a device and
    a vLLM, its version comes first. Empty for a recipe without engines."""
    if recipe.train.source != "rollout":
        return []
    name = device_kind(recipe.cluster, device)
    if name is None:
        return [route_of(recipe, None)]
    kind = kind_of(name)
    here = [route_here(recipe)] if kind.is_here() and installed_support() is not None else []
    return [*here, *routes_of_sets(recipe, kind.sets)] or [route_of(recipe, None)]


def as_expected(recipe: Recipe, routes: list[WeightRoute]) -> Recipe:
    """Return `recipe` with weight_sync.route=full if that is the expected route and the recipe leaves it open."""
    if not routes or routes[0].name != "full" or not is_sharded(recipe) or recipe.weight_sync.route != "auto":
        return recipe
    return replace(recipe, weight_sync=replace(recipe.weight_sync, route="full"))
