"""From a recipe to its twin: model, data and recipe in a folder, and what became of each setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.commands.data.tiny_model import write_model
from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.commands.rehearse.changes import Change, Changes
from megarl.commands.rehearse.data import write_data
from megarl.commands.rehearse.layout import layers_for
from megarl.commands.rehearse.model import shrink_model
from megarl.commands.rehearse.settings import note_kept, shrink_settings
from megarl.preflight.load import load_recipe
from megarl.preflight.models import check_policy, config_of
from megarl.recipe.load import to_yaml
from megarl.recipe.schema import Recipe

RECIPE = "twin.yaml"
_SEED = 0
_SPREAD = 0.1  # of norms' weights: an exchanged one shows


@dataclass(frozen=True)
class Twin:
    """`path`: its recipe, in the folder that holds everything else of it; `changes`: from the recipe given."""

    path: Path
    recipe: Recipe
    model: dict[str, Any]  # its config.json
    changes: list[Change]


def make_twin(
    path: Path, overrides: Sequence[str], folder: Path, *, processes: int | None = None, shape: str | None = None
) -> Twin:
    """Write the twin of the recipe at `path` below `folder`.

    processes: trainers at most; None: 2, or 4 where the layout cuts a pipeline and something else. shape: the model whose
    config.json is shrunk, by its name in `megarl.hf.published`; None: the recipe's own.
    Raises RecipeError or ValueError for a recipe that does not load, and for a model or data of which nothing is known.
    """
    recipe = load_recipe(path, overrides)
    changes = Changes()
    given = config_of(recipe.model.path, path, name=shape)
    check_policy(recipe, given)  # the recipe as it is: of the twin much could not be wrong any more
    twin = shrink_settings(recipe, processes, changes)
    config = shrink_model(given, max(layers_for(twin.megatron), layers_for(twin.critic.megatron)), changes)
    model = folder / "model"
    make_tiny_tokenizer(model, images="vision_config" in config)
    write_model(model, config, _SEED, _SPREAD)
    if "vision_config" in config:
        _write_image_processor(model, config["vision_config"])
    _name_models(twin, str(model), changes)
    write_data(recipe, twin, folder / "data", changes)
    changes.set(twin, "runs_dir", str(folder / "runs"), "beside the twin")
    if twin.exchange.directory is not None:
        changes.set(twin.exchange, "exchange.directory", str(folder / "exchange"), "beside the twin")
    note_kept(recipe, twin, changes)
    (folder / RECIPE).write_text(to_yaml(twin), encoding="utf-8")
    return Twin(folder / RECIPE, load_recipe(folder / RECIPE, []), config, changes.found)


def _name_models(twin: Recipe, model: str, changes: Changes) -> None:
    why = "random weights, a tiny tokenizer"
    changes.set(twin.model, "model.path", model, why)
    changes.set(twin.model, "model.tokenizer", None, why)
    for section, owner, name in (("critic", twin.critic, "model_path"), ("teacher", twin.teacher, "path"), ("judge", twin.judge, "path")):  # fmt: skip
        if getattr(owner, name):
            changes.set(owner, f"{section}.{name}", model, why)


def _write_image_processor(model: Path, vision: dict[str, Any]) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (model / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
