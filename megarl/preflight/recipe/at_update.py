"""Checks of `rollout.at_update`, `max_staleness` and `window`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.derived.at_update import cannot_continue, update_rule
from megarl.recipe.derived.weight_sync_route import is_sharded, wants_adapters
from megarl.recipe.schema import Recipe, RolloutConfig


def staleness_errors(recipe: Recipe) -> Iterator[RecipeError]:
    colocated = recipe.cluster.placement == "colocated"
    if colocated and recipe.rollout.max_staleness > 0 and update_rule(recipe) != "refresh":
        yield RecipeError(
            "rollout.max_staleness",
            "colocated engines stop and free their KV caches while trainers compute, so requests can only run ahead if they "
            "continue with recomputed caches (rollout.at_update=refresh), and this recipe's rule is "
            + update_rule(recipe),
            "set rollout.max_staleness=0, cluster.placement=disaggregated, or rollout.at_update=refresh where it is possible",
            value=recipe.rollout.max_staleness,
        )
    if 0 < recipe.rollout.max_staleness < 1 / recipe.data.prompts_per_step:
        yield RecipeError(
            "rollout.max_staleness",
            f"this share of data.prompts_per_step = {recipe.data.prompts_per_step} is less than a prompt",
            "set 0, or a larger value",
            value=recipe.rollout.max_staleness,
        )
    if update_rule(recipe) == "drain" and recipe.rollout.window != RolloutConfig().window:
        yield RecipeError(
            "rollout.window",
            "batches are in admission order with rollout.at_update=drain, which this recipe has",
            "leave it out, or set rollout.at_update=refresh",
            value=recipe.rollout.window,
        )


def at_update_errors(recipe: Recipe) -> Iterator[RecipeError]:
    rule = recipe.rollout.at_update
    if recipe.rollout.refresh_after is not None and rule != "keep":
        yield RecipeError(
            "rollout.refresh_after",
            f"only rollout.at_update=keep leaves caches of earlier weights, and this recipe's rule is {update_rule(recipe)}",
            "leave it out, or set rollout.at_update=keep",
            value=recipe.rollout.refresh_after,
        )
    if rule == "auto" or rule == "drain":
        return
    if recipe.rollout.max_staleness == 0:
        yield RecipeError(
            "rollout.at_update",
            "with rollout.max_staleness=0 no request runs when the weights change",
            "leave it out, or set rollout.max_staleness to 1 or more",
            value=rule,
        )
    reason = _cannot_finish(recipe) if rule == "finish" else cannot_continue(recipe)
    if reason is not None:
        finishes = rule != "finish" and _cannot_finish(recipe) is None
        remedy = f"set rollout.at_update={'finish or drain' if finishes else 'drain'}"
        yield RecipeError("rollout.at_update", reason, remedy, value=rule)
    if rule == "finish" and recipe.weight_sync.check_every:
        yield RecipeError(
            "weight_sync.check_every",
            "with rollout.at_update=finish, weights after the first update wait in host memory and are not in the engine when they "
            "would be compared",
            "leave it out, or set another rollout.at_update",
            value=recipe.weight_sync.check_every,
        )
    if recipe.train.deterministic:
        yield RecipeError(
            "rollout.at_update",
            "the moment at which an engine uses new weights depends on time, so a run with train.deterministic would not repeat",
            "set rollout.at_update=drain, or train.deterministic=false",
            value=rule,
        )
    if rule == "keep" and recipe.rollout.engine_args.get("async_scheduling"):
        yield RecipeError(
            "rollout.engine_args.async_scheduling",
            "with rollout.at_update=keep, tokens that are sampled but not yet returned at an update would count as tokens of the "
            "new weights",
            "leave it out, or set rollout.at_update=refresh",
            value=True,
        )
    if recipe.rollout.admission == "wave":
        yield RecipeError(
            "rollout.admission",
            f"waves wait until no request runs, and rollout.at_update={rule} does not",
            "leave it out, or set rollout.at_update=drain",
            value="wave",
        )


def _cannot_finish(recipe: Recipe) -> str | None:
    """Return why engines cannot keep new weights in host memory until their requests have finished; None if they can."""
    if recipe.rollout.engine != "vllm":
        return f"{recipe.rollout.engine} loads new weights as they arrive"
    if recipe.rollout.data_parallel > 1:
        return (
            "engines of a group (rollout.data_parallel) run each step together, and so cannot load weights one by one"
        )
    if not is_sharded(recipe) and not wants_adapters(recipe):
        return (
            "without sharded weight sync (weight_sync.route) each engine rank would keep the whole model in host memory"
        )
    return None
