"""The route that weights will take to the engines, as far as recipe and engine versions tell before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megarl.engines.vllm.reload import RouteSupport, installed_support, support_of
from megarl.errors import RecipeError
from megarl.platform.version_sets import VersionSet
from megarl.recipe.exchange import never_planned, planned_by_recipe, wants_adapters
from megarl.recipe.schema import Recipe

_ENGINE = "vllm"


@dataclass(frozen=True)
class Route:
    """A route and the reason for it. Trainers and engines may still refuse a planned one when they have started."""

    name: str  # "planned", "export", "adapters" or "none"
    why: str
    on: str  # the versions that this holds for; "": whichever
    remark: str = ""

    def __str__(self) -> str:
        on = f" on {self.on}" if self.on else ""
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.name}{on}: {self.why}{remark}"


def route_of(recipe: Recipe, support: RouteSupport | None, on: str = "") -> Route:
    """The route of `recipe` with a vLLM of `support`; None: its version is not known. `on`: the versions, in words."""
    exchange = recipe.exchange
    if support is not None and support.no_updates is not None and recipe.rollout.engine == _ENGINE:
        return Route("none", support.no_updates, on)
    if wants_adapters(recipe):
        return Route("adapters", f"exchange.adapters={exchange.adapters}, where engines can hold them", on)
    if not planned_by_recipe(recipe):
        reason = "the recipe says so" if exchange.route == "export" else never_planned(recipe) or ""
        return Route("export", f"exchange.route={exchange.route}: {reason}", on)
    if support is None:
        return Route("planned", f"exchange.route={exchange.route}; the version of vLLM is not known here", on)
    if support.no_planned is not None:
        return Route("export", support.no_planned, on)
    return Route("planned", f"exchange.route={exchange.route}", on, support.remark)


def routes_of_sets(recipe: Recipe, sets: Iterable[VersionSet]) -> list[Route]:
    """The route on each set of versions that names a vLLM, the default first."""
    found = []
    for one in sets:
        version = one.packages.get(_ENGINE, "")
        if version.startswith("=="):
            number = version.removeprefix("==")
            found.append(route_of(recipe, support_of(number), f"{one.name} (vLLM {number})"))
    return found


def route_here(recipe: Recipe) -> Route:
    """The route with the vLLM of this environment."""
    support = installed_support() if recipe.rollout.engine == _ENGINE else None
    return route_of(recipe, support, f"vLLM {support.version}, installed here" if support else "")


def check_route(recipe: Recipe, route: Route) -> None:
    """Raise RecipeError where the recipe insists on a route that its engines cannot take."""
    if recipe.train.source != "rollout":
        return
    if route.name == "none":
        what = f"engines cannot be given weights on {route.on}: {route.why}"
        raise RecipeError("rollout.engine", what, "install a later vLLM", value=recipe.rollout.engine)
    if route.name == "export" and recipe.exchange.route == "planned":
        what = f"engines cannot take it on {route.on}: {route.why}"
        remedy = "set exchange.route=auto or export (and exchange.transport=auto), or install another vLLM"
        raise RecipeError("exchange.route", what, remedy, value="planned")
