"""Which recipes' weights can go to the engines slice by slice."""

from __future__ import annotations

from megarl.config.errors import RecipeError
from megarl.config.schema import Recipe


def never_planned(recipe: Recipe) -> str | None:
    """Why no plan can be made, whatever the model and the engines are; None: it depends on these."""
    if recipe.lora.rank:
        return f"lora.rank={recipe.lora.rank}: engines are given merged weights, which are made when all are exported"
    if recipe.rollout.engine != "vllm":
        return f"rollout.engine={recipe.rollout.engine} takes whole tensors alone"
    return None


def planned_by_recipe(recipe: Recipe) -> bool:
    """Whether weights go slice by slice, as far as the recipe alone shows: `auto` also asks trainers and engines."""
    return recipe.exchange.route == "planned" or (recipe.exchange.route == "auto" and never_planned(recipe) is None)


def check_exchange(recipe: Recipe) -> None:
    exchange = recipe.exchange
    reason = never_planned(recipe)
    if exchange.route == "planned" and reason is not None:
        raise RecipeError("exchange.route", reason, "set exchange.route=export, or auto", value=exchange.route)
    if exchange.route == "export" and exchange.check_every:
        what = "with exchange.route=export there is nothing to compare with the export"
        raise RecipeError(
            "exchange.check_every", what, "leave it out, or set exchange.route=planned", value=exchange.check_every
        )
