"""Predict the weight sync route (sharded, full or adapters) from the recipe and the engine's version before the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megarl.engines.vllm.route_support import RouteSupport, installed_support, support_of
from megarl.errors import RecipeError
from megarl.hf.families import family_of
from megarl.platform.version_sets import VersionSet
from megarl.recipe.derived.weight_sync_route import is_sharded, wants_adapters, why_not_sharded
from megarl.recipe.schema import Recipe

_ENGINE = "vllm"


@dataclass(frozen=True)
class WeightRoute:
    """A route with its reason. Trainers and engines may still reject the sharded route after their start."""

    name: str  # "sharded", "full", "adapters" or "none"
    why: str
    on: str  # versions that it applies to; "": any
    remark: str = ""

    def __str__(self) -> str:
        on = f" on {self.on}" if self.on else ""
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.name}{on}: {self.why}{remark}"


def route_of(recipe: Recipe, support: RouteSupport | None, on: str = "") -> WeightRoute:
    """Return the route of `recipe` for a vLLM with `support` (None: version unknown). `on`: description of the version."""
    weight_sync = recipe.weight_sync
    if support is not None and support.no_updates is not None and recipe.rollout.engine == _ENGINE:
        return WeightRoute("none", support.no_updates, on)
    if wants_adapters(recipe):
        return WeightRoute("adapters", f"weight_sync.adapters={weight_sync.adapters}, where engines can hold them", on)
    if not is_sharded(recipe):
        reason = "the recipe says so" if weight_sync.route == "full" else why_not_sharded(recipe) or ""
        return WeightRoute("full", f"weight_sync.route={weight_sync.route}: {reason}", on)
    if support is None:
        return WeightRoute(
            "sharded", f"weight_sync.route={weight_sync.route}; the version of vLLM is not known here", on
        )
    if support.no_sharded is not None:
        return WeightRoute("full", support.no_sharded, on)
    return WeightRoute("sharded", f"weight_sync.route={weight_sync.route}", on, support.remark)


def routes_of_sets(recipe: Recipe, sets: Iterable[VersionSet]) -> list[WeightRoute]:
    """Return the route for each version set that names a vLLM version, in order: of a range the oldest version."""
    routes = []
    for version_set in sets:
        versions = [
            Version(part.version)
            for part in SpecifierSet(version_set.packages.get(_ENGINE, ""))
            if part.operator in ("==", ">=")
        ]
        if versions:
            release = (*min(versions).release, 0, 0)[:3]
            number = str(min(versions)) if min(versions).is_prerelease else ".".join(map(str, release))
            routes.append(route_of(recipe, support_of(number), f"{version_set.name} (vLLM {number})"))
    return routes


def route_here(recipe: Recipe) -> WeightRoute:
    """Return the route with the vLLM of this environment."""
    support = installed_support() if recipe.rollout.engine == _ENGINE else None
    return route_of(recipe, support, f"vLLM {support.version}, installed here" if support else "")


def check_route(recipe: Recipe, route: WeightRoute, model: dict[str, Any] | None = None) -> None:
    """Raise RecipeError for a route that the engines do not support. `model`: the policy's config.json; None: not known."""
    if recipe.train.source != "rollout":
        return
    if route.name == "none":
        problem = f"engines cannot update their weights on {route.on}: {route.why}"
        raise RecipeError("rollout.engine", problem, "install a later vLLM", value=recipe.rollout.engine)
    if route.name == "full" and recipe.weight_sync.route == "sharded":
        problem = f"engines do not support it on {route.on}: {route.why}"
        remedy = "set weight_sync.route=auto or full (and weight_sync.transport=auto), or install another vLLM"
        raise RecipeError("weight_sync.route", problem, remedy, value="sharded")
    if (
        route.name == "full"
        and recipe.rollout.engine == _ENGINE
        and model is not None
        and family_of(model).whole_experts
    ):
        problem = (
            f"vLLM's loader of {model['model_type']} writes experts without the weight loaders that the full route needs, and "
            f"this recipe takes it: {route.why}"
        )
        remedy = "set weight_sync.route=sharded, and leave out what excludes it"
        raise RecipeError("weight_sync.route", problem, remedy, value=recipe.weight_sync.route)
