"""Which recipes' weights can go to the engines slice by slice."""

from __future__ import annotations

from pathlib import Path

from megarl.recipe.schema import Recipe

_ARGUMENTS = {  # of vLLM
    "quantization": "weights that are quantised as they are loaded are no copies of the trainers'",
    "enable_eplb": "experts that move between devices are not where a plan puts them",
}


def never_planned(recipe: Recipe) -> str | None:
    """Why no plan can be made, whatever the model and the engines are; None: it depends on these."""
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


def planned_by_recipe(recipe: Recipe) -> bool:
    """Whether weights go slice by slice, as far as the recipe alone shows: `auto` also asks trainers and engines."""
    return recipe.exchange.route == "planned" or (recipe.exchange.route == "auto" and never_planned(recipe) is None)


def wants_adapters(recipe: Recipe) -> bool:
    """Whether engines are to be sent adapters alone, as far as the recipe alone shows: whether they can hold them, engines
    say."""
    return recipe.lora.rank > 0 and recipe.exchange.adapters != "merged" and recipe.train.source == "rollout"


def weights_directory(recipe: Recipe) -> Path:
    """Where weights lie that go as files."""
    given = recipe.exchange.directory
    return Path(given, recipe.name) if given else Path(recipe.runs_dir, recipe.name, "exchange")
