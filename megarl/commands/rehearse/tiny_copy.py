"""Create the tiny copy of a recipe: model, data and recipe in one folder, and the list of changes."""

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
from megarl.errors import raise_all
from megarl.hf.families import has_tower
from megarl.preflight.load import load_recipe
from megarl.preflight.models import check_cpu_engine, policy_config_of, policy_errors
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml

RECIPE = "tiny_copy.yaml"
_NO_ENGINE = (  # a rehearsal sets cluster.device=cpu
    "check the recipe with `megarl plan`, which needs no engine, and rehearse the model's trainers with an SFT recipe: "
    "megarl rehearse recipes/retool_sft.yaml --shape NAME (a name of megarl/hf/published)"
)
_SEED = 0
_FOLDER = "in the folder of the tiny copy"
_SPREAD = 0.1  # standard deviation of norm weights, so that swapped norms are detected


@dataclass(frozen=True)
class TinyCopy:
    """A tiny copy of a recipe. `path` is the recipe's file; model and data are in the same folder."""

    path: Path
    recipe: Recipe
    model: dict[str, Any]  # its config.json
    changes: list[Change]


def make_tiny_copy(
    path: Path, overrides: Sequence[str], folder: Path, *, processes: int | None = None, shape: str | None = None
) -> TinyCopy:
    """Write a tiny copy of the recipe at `path` into `folder`.

    processes: the largest number of trainers; None: 2, or 4 for a pipeline combined with another kind of parallelism.
    shape: the name in `megarl.hf.published` of the model to shrink; None: the recipe's model.
    Raises RecipeError or ValueError if the recipe does not load, if its model or data are unknown, or if no engine on a CPU can
    sample from the model.
    """
    recipe = with_cached_inputs(load_recipe(path, overrides))
    changes = Changes()
    hf_config = policy_config_of(recipe.model, path, shape)
    raise_all(policy_errors(recipe, hf_config))  # before shrinking, which hides many errors
    small = shrink_settings(recipe, processes, changes)
    check_cpu_engine(small, hf_config, _NO_ENGINE)
    config = shrink_model(hf_config, max(layers_for(small.megatron), layers_for(small.critic.megatron)), changes)
    model = folder / "model"
    make_tiny_tokenizer(model, images=has_tower(config))
    write_model(model, config, _SEED, _SPREAD)
    if has_tower(config):
        _write_processors(model, config)
    _set_model_paths(small, str(model), changes)
    write_data(recipe, small, folder / "data", changes)
    changes.set(small, "runs_dir", str(folder / "runs"), _FOLDER)
    if small.weight_sync.directory is not None:
        changes.set(small.weight_sync, "weight_sync.directory", str(folder / "weight_sync"), _FOLDER)
    note_kept(recipe, small, changes)
    (folder / RECIPE).write_text(to_yaml(small), encoding="utf-8")
    return TinyCopy(folder / RECIPE, load_recipe(folder / RECIPE, []), config, changes.items)


def _set_model_paths(small: Recipe, model: str, changes: Changes) -> None:
    reason = "random weights and a tiny tokenizer"
    changes.set(small.model, "model.path", model, reason)
    changes.set(small.model, "model.tokenizer", None, reason)
    if isinstance(small.data.chat_template, str):
        changes.set(small.data, "data.chat_template", True, "the tiny tokenizer has other special tokens")
    for section, owner, name in (("critic", small.critic, "model_path"), ("teacher", small.teacher, "path"), ("judge", small.judge, "path")):  # fmt: skip
        if getattr(owner, name):
            changes.set(owner, f"{section}.{name}", model, reason)
    for source, teacher in small.teacher.by_source.items():
        changes.set(teacher, f"teacher.by_source.{source}.path", model, reason)


def _write_processors(model: Path, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
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
    kind = "Qwen2VL" if config["model_type"] == "qwen2_5_vl" else "Qwen3VL"
    size = {"shortest_edge": 3136, "longest_edge": 25165824}
    settings = {**settings, "video_processor_type": f"{kind}VideoProcessor", "size": size}
    (model / "video_preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
