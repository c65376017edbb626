"""Treatment of running requests at an update of the weights (`rollout.at_update`), with its window and largest lag (`max_lag`)."""

from __future__ import annotations

import math
from typing import Literal

from megarl.recipe.schema import Recipe

UpdateRule = Literal["drain", "finish", "refresh", "keep"]


def update_rule(recipe: Recipe) -> UpdateRule:
    """Return the rule of a run. `auto` is refresh if engines sample ahead and requests can continue with other weights."""
    rollout = recipe.rollout
    if rollout.at_update != "auto":
        return rollout.at_update
    return "refresh" if rollout.max_staleness > 0 and not_refreshed(recipe) is None else "drain"


def not_refreshed(recipe: Recipe) -> str | None:
    """Return why `auto` drains an asynchronous run; None if it refreshes."""
    if recipe.train.deterministic:
        return "with train.deterministic, updates must not depend on time"
    if recipe.rollout.admission == "wave":
        return "rollout.admission=wave starts a batch's groups together"
    return cannot_continue(recipe)


def cannot_continue(recipe: Recipe) -> str | None:
    """Return why requests cannot continue when weights change; None if they can."""
    if recipe.rollout.engine != "vllm":
        return f"{recipe.rollout.engine} ends running requests when its weights change"
    if recipe.megatron.routing_replay == "rollout":
        return (
            "an engine that recomputes a KV cache with new weights (at an update, or for lack of memory) records other experts "
            "for earlier tokens, and megatron.routing_replay=rollout needs the first ones"
        )
    return None


def is_continuous(recipe: Recipe) -> bool:
    """Return whether replacements of filtered groups start at once (`rollout.admission`)."""
    if recipe.rollout.admission is None:
        return update_rule(recipe) != "drain"
    return recipe.rollout.admission == "continuous"


def window_groups(recipe: Recipe) -> int:
    """Return W: at most W - 1 later groups may enter a batch before a group.

    W - 1 is a multiple of the groups of a batch: less would bound the largest lag no further.
    """
    if update_rule(recipe) == "drain":
        return 1
    prompts = recipe.data.prompts_per_step
    share = whole_number(recipe.rollout.window * (recipe.rollout.max_staleness + 1) * prompts)
    return max(0, math.ceil((share - 1) / prompts)) * prompts + 1


def whole_number(share: float) -> int:
    """Return `share` groups as a whole number. A product such as 0.57 x 100 may be just below it as a float."""
    return math.floor(share + 1e-9)


def max_lag(recipe: Recipe) -> int:
    """Return the largest number of versions between the start of a group and the policy that trains on it."""
    overtaking = -(-(window_groups(recipe) - 1) // recipe.data.prompts_per_step)
    return math.ceil(recipe.rollout.max_staleness) + overtaking


def update_notice(recipe: Recipe) -> str | None:
    """Return a notice if engines update at different times, or while requests run, or if `auto` drains an asynchronous run."""
    rule = update_rule(recipe)
    if recipe.train.source != "rollout":
        return None
    if rule == "drain":
        if recipe.rollout.at_update != "auto" or recipe.rollout.max_staleness == 0:
            return None
        return (
            f"rollout.at_update is drain (auto with rollout.max_staleness={recipe.rollout.max_staleness:g}): "
            f"{not_refreshed(recipe)}; weights change when no request runs, so a step takes at least as long as its longest response"
        )
    if rule == "finish":
        alone = (
            ""
            if recipe.rollout.engines > 1
            else "; a single engine samples nothing while it finishes and loads, as with drain"
        )
        return (
            "rollout.at_update is finish (set by the recipe): each engine keeps new weights in host memory until its requests have "
            f"finished; a sample is at most {max_lag(recipe)} versions old; a repeated run samples other responses; "
            f"rollout.at_update=drain repeats{alone}"
        )
    origin = f"auto with rollout.max_staleness={recipe.rollout.max_staleness:g}"
    kept = "keep their KV cache" if rule == "keep" else "recompute their KV cache"
    return (
        f"rollout.at_update is {rule} ({origin if recipe.rollout.at_update == 'auto' else 'set by the recipe'}): running "
        f"requests take new weights and {kept}; a sample's first token is at most {max_lag(recipe)} versions old; a repeated "
        "run samples other responses; rollout.at_update=drain lets requests finish first, and repeats"
    )
