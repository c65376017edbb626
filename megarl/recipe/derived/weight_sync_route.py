"""Route of the weight sync that a recipe selects (sharded, full, or adapters only), and its reasons against sharded."""

from __future__ import annotations

from pathlib import Path

from megarl.recipe.schema import Recipe

_ARGUMENTS = {  # vLLM arguments that exclude sharded sync, with the reason
    "enable_eplb": "experts that move between devices do not stay where the plan expects them",
}


def why_not_sharded(recipe: Recipe) -> str | None:
    """Return why the recipe rules out sharded weight sync; None if only trainers and engines can."""
    if recipe.lora.rank:
        return f"lora.rank={recipe.lora.rank}: adapters are sent whole, and merged weights require a full export"
    if recipe.rollout.engine != "vllm":
        return f"rollout.engine={recipe.rollout.engine} accepts only whole tensors"
    if recipe.weight_sync.transport == "files":
        return "weight_sync.transport=files: files contain whole tensors"
    for name, why in _ARGUMENTS.items():
        if value := recipe.rollout.engine_args.get(name):
            return f"rollout.engine_args.{name}={value}: {why}"
    return None


def is_sharded(recipe: Recipe) -> bool:
    """Return True if the recipe selects sharded weight sync. With `auto`, trainers and engines may still refuse it."""
    return recipe.weight_sync.route == "sharded" or (
        recipe.weight_sync.route == "auto" and why_not_sharded(recipe) is None
    )


def wants_adapters(recipe: Recipe) -> bool:
    """Return True if the recipe sends only adapters. Engines may still refuse them."""
    return recipe.lora.rank > 0 and recipe.weight_sync.adapters != "merged" and recipe.train.source == "rollout"


def weights_directory(recipe: Recipe) -> Path:
    """Return the directory of weight files for `weight_sync.transport: files`."""
    directory = recipe.weight_sync.directory
    return Path(directory, recipe.name) if directory else Path(recipe.runs_dir, recipe.name, "weight_sync")
