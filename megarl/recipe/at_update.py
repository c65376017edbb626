"""What becomes of running requests at an update of the weights (`rollout.at_update`), and the settings that follow from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe

UpdateRule = Literal["drain", "refresh", "keep"]


def update_rule(recipe: Recipe) -> UpdateRule:
    """Return the rule of a run. `auto` is refresh if engines sample ahead and requests can continue with other weights."""
    rollout = recipe.rollout
    if rollout.at_update != "auto":
        return rollout.at_update
    ahead = rollout.max_staleness > 0 and not recipe.train.deterministic and rollout.admission != "wave"
    return "refresh" if ahead and cannot_continue(recipe, "refresh") is None else "drain"


def cannot_continue(recipe: Recipe, rule: UpdateRule) -> str | None:
    """Return why requests cannot continue under `rule` when weights change; None if they can."""
    if recipe.rollout.engine != "vllm":
        return f"{recipe.rollout.engine} ends running requests when its weights change"
    if rule == "refresh" and recipe.megatron.routing_replay == "rollout":
        return (
            "the engine recomputes the KV cache with the new weights and so replaces the recorded experts of earlier tokens, "
            "which megatron.routing_replay=rollout needs"
        )
    return None


def is_continuous(recipe: Recipe) -> bool:
    """Return whether replacements of filtered groups start at once (`rollout.admission`)."""
    if recipe.rollout.admission is None:
        return update_rule(recipe) != "drain"
    return recipe.rollout.admission == "continuous"


def window_groups(recipe: Recipe) -> int:
    """Return W: a finished group may enter a batch if its number is below that of the oldest unreleased group plus W."""
    if update_rule(recipe) == "drain":
        return 1
    alive = (recipe.rollout.max_staleness + 1) * recipe.data.prompts_per_step
    return max(1, math.floor(recipe.rollout.window * alive))


def max_lag(recipe: Recipe) -> int:
    """Return the largest number of versions between the start of a group and the policy that trains on it."""
    return recipe.rollout.max_staleness + -(-(window_groups(recipe) - 1) // recipe.data.prompts_per_step)
