"""How a recipe's weights go to the engines: sharded, full, or adapters alone."""

from __future__ import annotations

from pathlib import Path

from megarl.recipe.schema import Recipe

_ARGUMENTS = {  # of vLLM
    "quantization": "weights that are quantised as they are loaded are no copies of the trainers'",
    "enable_eplb": "experts that move between devices are not where a plan puts them",
}


def why_not_sharded(recipe: Recipe) -> str | None:
    """Return why the recipe rules out sharded weight sync; None if only trainers and engines can."""
    if recipe.lora.rank:
        return f"lora.rank={recipe.lora.rank}: adapters go whole, and merged weights are made when all are exported"
    if recipe.rollout.engine != "vllm":
        return f"rollout.engine={recipe.rollout.engine} takes whole tensors alone"
    if recipe.exchange.transport == "files":
        return "exchange.transport=files: files have whole tensors"
    for name, why in _ARGUMENTS.items():
        if value := recipe.rollout.engine_args.get(name):
            return f"rollout.engine_args.{name}={value}: {why}"
    return None


def is_sharded(recipe: Recipe) -> bool:
    """Return True if the recipe selects sharded weight sync. With `auto`, trainers and engines may still refuse it."""
    return recipe.exchange.route == "planned" or (recipe.exchange.route == "auto" and why_not_sharded(recipe) is None)


def wants_adapters(recipe: Recipe) -> bool:
    """Return True if the recipe sends adapters alone. Engines may still refuse them."""
    return recipe.lora.rank > 0 and recipe.exchange.adapters != "merged" and recipe.train.source == "rollout"


def weights_directory(recipe: Recipe) -> Path:
    """Return the directory of weight files for `exchange.transport: files`."""
    directory = recipe.exchange.directory
    return Path(directory, recipe.name) if directory else Path(recipe.runs_dir, recipe.name, "exchange")
