"""A smaller copy of a recipe for the devices of one node: full widths, few layers, dummy weights, a smaller layout."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.data.tiny_weights import shapes
from megarl.commands.rehearse.changes import Changes
from megarl.commands.rehearse.data import write_data
from megarl.commands.rehearse.layout import layers_for, with_sizes
from megarl.commands.rehearse.settings import shrink_settings
from megarl.engines.specs import fixed_models
from megarl.hf.config import experts_per_token, number_of_experts, text_fields, with_experts, with_layers
from megarl.hf.families.tables.family_table import without_table
from megarl.preflight.load import load_recipe
from megarl.preflight.models import read_hf_config, with_family_table
from megarl.recipe.derived.lengths import longest_sample
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.recipe.text import to_yaml
from megarl.recipe.trainers import MegatronConfig

RECIPE = "cut.yaml"
PROMPT, RESPONSE = 256, 512  # tokens at most
SEQUENCES = 4  # largest number of sequences of maximum length in a micro batch
STATE_BYTES = 14  # per parameter in a checkpoint: bfloat16, a float32 master, two float32 moments
_TILE = 1 << 20  # random values, repeated in every tensor
_SPREAD = 0.02  # standard deviation of matrices
_FILES = (".json", ".jinja", ".model", ".py", ".txt")  # files of a model other than its weights


@dataclass(frozen=True)
class Cut:
    """A smaller copy of a recipe. `path`: its file. `config`: its model's config.json. `layout`: a text with both layouts."""

    path: Path
    recipe: Recipe
    config: dict[str, Any]
    layout: str


class CannotCut(ValueError):
    """The recipe cannot be reduced to these devices; the text is the reason."""


def make_cut(path: Path, overrides: Sequence[str], folder: Path, device: str, devices: int) -> Cut:
    """Write the copy's recipe, model and data to `folder`.

    device: the kind, as in cluster.device. devices: their number on this node. Raises CannotCut if the recipe's model is
    not on this node or other models need devices, and RecipeError if the recipe does not load.
    """
    recipe = with_cached_inputs(with_absolute_paths(load_recipe(path, list(overrides))))
    if fixed := fixed_models(recipe):
        raise CannotCut(f"engines of {' and '.join(fixed)} need separate devices")
    if not (Path(recipe.model.path) / "config.json").is_file():
        raise CannotCut(f"{recipe.model.path} has no config.json: fetch the model, or its config and tokenizer")
    config = text_fields(with_family_table(read_hf_config(recipe.model.path), recipe.model))
    cut = shrink_settings(recipe, devices, Changes())
    cut.cluster.device, cut.cluster.threads = device, recipe.cluster.threads  # type: ignore[assignment]
    for_trainers, for_critic, for_engines = split(recipe, devices)
    cut.megatron, cut.cluster.trainers = fit_layout(recipe.megatron, recipe.cluster.trainers, for_trainers)
    _engines(cut.rollout, recipe.rollout, for_engines)
    _sizes(cut, recipe)
    config = cut_config(config, recipe.megatron, cut.megatron)
    model = folder / "model"
    _write_model(model, config, Path(recipe.model.path), folder)
    cut.model.path, cut.model.tokenizer = str(model), recipe.model.tokenizer
    if uses_critic(recipe.algorithm):
        cut.critic.model_path = str(model) if recipe.critic.model_path else recipe.critic.model_path
        like = recipe.critic
        cut.critic.megatron, cut.critic.trainers = fit_layout(like.megatron, like.trainers, for_critic)
    cut.runs_dir, cut.name, cut.train.restarts = str(folder / "runs"), "cut", 0
    cut.rollout.min_engines, cut.train.trainer_restarts = None, 0
    cut.train.journal, cut.train.keep_workers = False, 0.0
    cut.weight_sync = replace(
        recipe.weight_sync, directory=None if recipe.weight_sync.directory is None else str(folder / "x")
    )
    write_data(recipe, cut, folder / "data", Changes())
    parameters = sum(math.prod(shape) for _, shape in shapes(config))
    if 2 * STATE_BYTES * parameters > shutil.disk_usage(folder).free:
        cut.train.save_every, cut.train.save_at_end = 0, False
    (folder / RECIPE).write_text(to_yaml(cut), encoding="utf-8")
    return Cut(
        folder / RECIPE, load_recipe(folder / RECIPE, []), config, describe_layout(cut, recipe.cluster.trainers, config)
    )


def split(recipe: Recipe, devices: int) -> tuple[int, int, int]:
    """Return the number of devices for trainers, for the critic and for engines, which may be the same devices.

    Raises CannotCut if they need separate devices and there are too few.
    """
    engines = recipe.rollout.engines * recipe.rollout.tensor_parallel if recipe.train.source == "rollout" else 0
    critics = recipe.critic.trainers if uses_critic(recipe.algorithm) else 0
    if not engines or recipe.cluster.placement == "colocated":
        return devices, devices, devices
    if recipe.cluster.trainers + critics + engines <= devices:
        return recipe.cluster.trainers, critics, engines
    if devices < (3 if critics else 2):
        groups = "trainers, critic and engines" if critics else "trainers and engines"
        raise CannotCut(f"{groups} need separate devices, and this node has {devices}")
    for_engines = min(engines, devices // 2)
    for_critic = min(critics, (devices - for_engines) // 2)
    return devices - for_engines - for_critic, for_critic, for_engines


def fit_layout(megatron: MegatronConfig, trainers: int, devices: int) -> tuple[MegatronConfig, int]:
    """Return a layout for `devices` devices and its number of trainers. It is unchanged if all trainers fit.

    Otherwise tensor parallel is reduced as little as possible, pipeline and context parallel are reduced to at most 2, and data parallel uses the
    other devices. Expert parallel uses all ranks of a pipeline stage, so it is as large as possible.
    """
    if trainers <= devices:
        return replace(megatron), trainers
    pipeline = 2 if megatron.pipeline_parallel > 1 and devices % 2 == 0 else 1
    tensor = math.gcd(megatron.tensor_parallel, devices // pipeline)
    context = math.gcd(min(megatron.context_parallel, 2), devices // (tensor * pipeline))
    ranks = devices // pipeline
    experts_cut = megatron.expert_tensor_parallel
    if experts_cut is not None:
        experts_cut = math.gcd(experts_cut, ranks)
    expert = math.gcd(megatron.expert_parallel, ranks // (experts_cut or 1))
    return with_sizes(megatron, tensor, pipeline, context, expert, experts_cut), devices


def layers_of(megatron: MegatronConfig) -> int:
    """Return the number of layers of the small model: two per (virtual) stage, or the number that uneven stages need."""
    if megatron.first_stage_layers or megatron.last_stage_layers:
        return layers_for(megatron)
    return 2 * megatron.pipeline_parallel * (megatron.virtual_pipeline or 1)


def cut_config(config: dict[str, Any], original: MegatronConfig, cut: MegatronConfig) -> dict[str, Any]:
    """Return a config.json with few layers, and with the recipe's number of experts per rank."""
    small = {name: value for name, value in config.items() if name not in ("text_config", "quantization_config")}
    experts = fewer_experts(config, cut.expert_parallel, original.expert_parallel)
    return small | with_layers(config, layers_of(cut)) | experts


def fewer_experts(config: dict[str, Any], ranks: int, like: int) -> dict[str, int]:
    """Return the field of config.json that keeps the number of experts per rank when `like` ranks become `ranks`.

    Empty for a dense model, and if the model's groups of experts do not divide the number.
    """
    groups, experts = config.get("n_group") or 1, number_of_experts(config)
    if not experts or ranks >= like:
        return {}
    fewer = max(experts * ranks // like, experts_per_token(config), 2 * groups)
    if fewer % ranks or fewer % groups:
        return {}
    return with_experts(config, fewer)


def _engines(rollout: RolloutConfig, like: RolloutConfig, devices: int) -> None:
    """Set the engine of `like`, its arguments and its precision, with as many engines as the devices allow."""
    rollout.engine, rollout.engine_args = like.engine, copy.deepcopy(like.engine_args)
    rollout.quantization = like.quantization
    rollout.tensor_parallel = math.gcd(like.tensor_parallel, devices)
    rollout.data_parallel = math.gcd(like.data_parallel, devices // rollout.tensor_parallel)
    rollout.expert_parallel = like.expert_parallel
    groups = min(like.engines // like.data_parallel, devices // rollout.tensor_parallel // rollout.data_parallel)
    rollout.engines = max(1, groups) * rollout.data_parallel


def _sizes(cut: Recipe, recipe: Recipe) -> None:
    """Set lengths and micro batches so that the memory peak equals the peak of full micro batches, as in a plan."""
    cut.data.max_prompt_length = min(recipe.data.max_prompt_length, PROMPT)
    cut.rollout.max_response_length = min(recipe.rollout.max_response_length, RESPONSE)
    longest = longest_sample(cut)
    most = SEQUENCES * longest
    cut.actor.max_tokens_per_micro_batch = max(longest, min(recipe.actor.max_tokens_per_micro_batch, most))
    if uses_critic(recipe.algorithm):
        cut.critic.max_tokens_per_micro_batch = max(longest, min(recipe.critic.max_tokens_per_micro_batch, most))
    parallel = cut.megatron.tensor_parallel * cut.megatron.pipeline_parallel * cut.megatron.context_parallel
    ranks = cut.cluster.trainers // parallel
    cut.data.prompts_per_step = max(cut.data.prompts_per_step, cut.actor.mini_batches * ranks)


def _write_model(model: Path, config: dict[str, Any], source: Path, folder: Path) -> None:
    """Write dummy weights in bfloat16, one file per layer, and copy the tokenizer and other small files."""
    import torch
    from safetensors.torch import save_file

    try:
        tensors = list(shapes(config))
    except ValueError as error:
        raise CannotCut(str(error)) from error
    weight_bytes, free = 2 * sum(math.prod(shape) for _, shape in tensors), shutil.disk_usage(folder).free
    if 2 * weight_bytes > free:
        raise CannotCut(f"twice its weights need {2 * weight_bytes >> 30} GiB, and {folder} has {free >> 30} GiB free")
    model.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in _FILES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, model / path.name)
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(0)).mul_(_SPREAD).bfloat16()
    files: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in tensors:
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append((name, shape))
    for file, group in files.items():
        save_file({name: _values(torch, tile, name, shape) for name, shape in group}, model / file, {"format": "pt"})
    index = {name: file for file, group in files.items() for name, _ in group}
    text = json.dumps({"metadata": {"total_size": weight_bytes}, "weight_map": index})
    (model / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    (model / "config.json").write_text(json.dumps(without_table(config), indent=1), encoding="utf-8")


def _values(torch: Any, tile: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor's dummy values: ones for norms, zeros for biases, else the repeated tile."""
    if len(shape) == 1:
        return torch.full(shape, float("norm" in name or name.endswith("ln_q.weight")), dtype=torch.bfloat16)
    count = math.prod(shape)
    return tile.repeat(-(-count // _TILE))[:count].reshape(shape)


def describe_layout(cut: Recipe, trainers: int, config: dict[str, Any]) -> str:
    """Describe the layout of a cut and the recipe's number of trainers: `TP4 PP2 EP2 ETP4 on 8 trainers (the recipe: 16), 2 engines of TP2, 4 layers`."""
    rollout = cut.rollout
    engines = f"{rollout.engines} engines of TP{rollout.tensor_parallel}" + (
        f" in groups of {rollout.data_parallel}" if rollout.data_parallel > 1 else ""
    )
    return f"{layout_text(cut.megatron)} on {cut.cluster.trainers} trainers (the recipe: {trainers}), {engines}, {config['num_hidden_layers']} layers"


def layout_text(megatron: MegatronConfig) -> str:
    """Return the sizes above 1: `TP4 PP2 EP2 ETP4`."""
    sizes = {
        "TP": megatron.tensor_parallel, "PP": megatron.pipeline_parallel, "CP": megatron.context_parallel,
        "EP": megatron.expert_parallel, "ETP": megatron.expert_tensor_parallel or 1,
    }  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
