"""Seeds of single samples (`rollout.seeded`): the value of `auto`, and the notice about cost and repeatability."""

from __future__ import annotations

from megarl import platform
from megarl.platform.kinds import kind_of
from megarl.recipe.schema import Recipe

# SGLang reads a request's seed only in this mode (sampling/sampling_batch_info.py).
_SGLANG_COST = "SGLang's deterministic mode for the whole engine (enable_deterministic_inference)"


def samples_are_seeded(recipe: Recipe) -> bool:
    """Return whether each sample, and each verdict of a judge, has a separate random generator and seed.

    `auto` is true on devices where such generators are cheap (`DeviceKind.seeds_cost`) and with `train.deterministic`.
    """
    if recipe.rollout.seeded == "auto":
        return recipe.train.deterministic or not kind_of(platform.kind(recipe.cluster.device)).seeds_cost
    return bool(recipe.rollout.seeded)


def seeds_notice(recipe: Recipe) -> str | None:
    """Return a notice of the cost of seeds, or of the lost repeatability without them; None if neither applies."""
    if recipe.train.source != "rollout":
        return None
    device, seeded = platform.kind(recipe.cluster.device), samples_are_seeded(recipe)
    sglang = recipe.rollout.engine == "sglang"
    cost = _SGLANG_COST if sglang else kind_of(device).seeds_cost
    if seeded and not cost:
        return None
    origin = f"auto on {device}" if recipe.rollout.seeded == "auto" else "set by the recipe"
    if seeded and recipe.rollout.seeded == "auto":
        origin = "auto with train.deterministic"
    if seeded:
        return (
            f"rollout.seeded is true ({origin}): each sample has a separate generator, at the cost of {cost}; "
            "rollout.seeded=false draws for all requests at once"
        )
    draws = "all samples" if sglang else "all samples of a weight version"
    return (
        f"rollout.seeded is false ({origin}): an engine draws {draws} from one random generator, so "
        "a repeated or resumed run samples other responses; rollout.seeded=true gives each sample a separate generator"
        + (f", at the cost of {cost}" if cost else "")
    )
