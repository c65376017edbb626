"""A copy of a recipe for the devices of one node: full widths, few layers, dummy weights, the layout as far as it goes."""

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
from megarl.commands.rehearse.layout import layers_for, stage_layers
from megarl.commands.rehearse.settings import shrink_settings
from megarl.engines.specs import fixed_models, longest_sample
from megarl.hf.config import number_of_experts, text_fields
from megarl.preflight.load import load_recipe
from megarl.preflight.models import read_hf_config
from megarl.recipe.load import to_yaml
from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import Recipe
from megarl.recipe.training import MegatronConfig

RECIPE = "cut.yaml"
PROMPT, RESPONSE = 256, 512  # tokens at most
SEQUENCES = 4  # of the longest length, in a micro batch at most
STATE_BYTES = 14  # of a parameter in a checkpoint: bfloat16, a float32 master, two float32 moments
_TILE = 1 << 20  # random values, repeated through every tensor
_SPREAD = 0.02  # of matrices
_FILES = (".json", ".jinja", ".model", ".py", ".txt")  # beside weights, in a model's folder


@dataclass(frozen=True)
class Cut:
    """`path`: the copy's recipe file. `config`: its model's config.json. `layout`: its sizes beside the recipe's, for people."""

    path: Path
    recipe: Recipe
    config: dict[str, Any]
    layout: str


class CannotCut(ValueError):
    """The recipe has no copy on these devices; the text is the reason."""


def make_cut(path: Path, overrides: Sequence[str], folder: Path, device: str, devices: int) -> Cut:
    """Write the copy's recipe, model and data below `folder`.

    `device`: the kind, as cluster.device names it; `devices`: how many this node has. Raises CannotCut for a recipe whose
    model is not on this node, or that takes devices for models which are not cut, and RecipeError as `load_recipe` does.
    """
    given = with_absolute_paths(load_recipe(path, list(overrides)))
    if fixed := fixed_models(given):
        raise CannotCut(f"engines of {' and '.join(fixed)} take devices of their own")
    if not (Path(given.model.path) / "config.json").is_file():
        raise CannotCut(f"{given.model.path} holds no config.json: fetch the model, or its config and tokenizer")
    config = text_fields(read_hf_config(given.model.path))
    cut = shrink_settings(given, devices, Changes())
    cut.cluster.device, cut.cluster.threads = device, given.cluster.threads  # type: ignore[assignment]
    for_trainers, for_engines = split(given, devices)
    cut.megatron, cut.cluster.trainers = fit_layout(given.megatron, given.cluster.trainers, for_trainers)
    _engines(cut, given, for_engines)
    _sizes(cut, given)
    config = cut_config(config, given.megatron, cut.megatron)
    model = folder / "model"
    _write_model(model, config, Path(given.model.path), folder)
    cut.model.path, cut.model.tokenizer = str(model), given.model.tokenizer
    if uses_critic(given.algorithm):
        cut.critic.model_path = str(model) if given.critic.model_path else given.critic.model_path
        like = given.critic
        cut.critic.megatron, cut.critic.trainers = fit_layout(like.megatron, like.trainers, for_trainers)
    cut.runs_dir, cut.name = str(folder / "runs"), "cut"
    cut.exchange = replace(given.exchange, directory=None if given.exchange.directory is None else str(folder / "x"))
    write_data(given, cut, folder / "data", Changes())
    parameters = sum(math.prod(shape) for _, shape in shapes(config))
    if 2 * STATE_BYTES * parameters > shutil.disk_usage(folder).free:
        cut.train.save_every, cut.train.save_at_end = 0, False
    (folder / RECIPE).write_text(to_yaml(cut), encoding="utf-8")
    return Cut(folder / RECIPE, load_recipe(folder / RECIPE, []), config, in_words(given, cut, config))


def split(recipe: Recipe, devices: int) -> tuple[int, int]:
    """Devices of trainers, and of engines: the same where they take turns. Raises CannotCut for one device for two."""
    engines = recipe.rollout.engines * recipe.rollout.tensor_parallel if recipe.train.source == "rollout" else 0
    if not engines or recipe.cluster.placement == "colocated":
        return devices, devices
    if recipe.cluster.trainers + engines <= devices:
        return recipe.cluster.trainers, engines
    if devices < 2:
        raise CannotCut("trainers and engines have devices of their own, and there is one")
    of_engines = min(engines, devices // 2)
    return devices - of_engines, of_engines


def fit(size: int, most: int) -> int:
    """Return the largest divisor of `size` that divides `most`."""
    return math.gcd(size, most)


def fit_layout(megatron: MegatronConfig, trainers: int, devices: int) -> tuple[MegatronConfig, int]:
    """The layout on `devices` devices, and how many of them it takes: unchanged where all trainers find room.

    Else tensor parallel is kept, pipeline and context parallel are cut in two, and data parallel has the rest: so expert
    parallel, which takes its ranks from all but the pipeline's, is as large as it can be.
    """
    if trainers <= devices:
        return replace(megatron), trainers
    halves = 2 if megatron.pipeline_parallel > 1 and devices % 2 == 0 else 1
    tensor = fit(megatron.tensor_parallel, devices // halves)
    pipeline = halves
    context = fit(min(megatron.context_parallel, 2), devices // (tensor * pipeline))
    ranks = devices // pipeline
    experts_cut = megatron.expert_tensor_parallel
    if experts_cut is not None:
        experts_cut = fit(experts_cut, ranks)
    small = replace(
        megatron,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
        expert_parallel=fit(megatron.expert_parallel, ranks // (experts_cut or 1)),
        expert_tensor_parallel=experts_cut,
        sequence_parallel=megatron.sequence_parallel if tensor > 1 else None,
        virtual_pipeline=2 if megatron.virtual_pipeline and pipeline > 1 else None,
    )
    first, last = stage_layers(small)
    return replace(small, first_stage_layers=first, last_stage_layers=last), devices


def layers_of(megatron: MegatronConfig) -> int:
    """Layers of the cut model: two for each (virtual) stage, or as many as uneven stages take."""
    if megatron.first_stage_layers or megatron.last_stage_layers:
        return layers_for(megatron)
    return 2 * megatron.pipeline_parallel * (megatron.virtual_pipeline or 1)


def cut_config(config: dict[str, Any], given: MegatronConfig, cut: MegatronConfig) -> dict[str, Any]:
    """config.json with few layers, and with as many experts on a rank as the recipe has."""
    small = {name: value for name, value in config.items() if name not in ("text_config", "quantization_config")}
    dense = min(1, config.get("first_k_dense_replace") or 0)
    layers = max(layers_of(cut), dense + 1)
    small["num_hidden_layers"] = layers
    if dense:
        small["first_k_dense_replace"] = dense
    if kinds := config.get("layer_types"):
        small["layer_types"] = (kinds * layers)[:layers]
    if config.get("max_window_layers") is not None:
        small["max_window_layers"] = min(config["max_window_layers"], layers)
    return small | fewer_experts(config, cut.expert_parallel, given.expert_parallel)


def fewer_experts(config: dict[str, Any], ranks: int, like: int) -> dict[str, int]:
    """The field of config.json with the number of routed experts that leaves each of `ranks` as many as each of `like` has;
    empty for a dense model, and where the model's groups of experts do not divide them."""
    groups, experts = config.get("n_group") or 1, number_of_experts(config)
    if not experts or ranks >= like:
        return {}
    fewer = max(experts * ranks // like, config["num_experts_per_tok"], 2 * groups)
    if fewer % ranks or fewer % groups:
        return {}
    name = next(name for name in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(name))
    return {name: fewer}


def _engines(cut: Recipe, given: Recipe, devices: int) -> None:
    """The recipe's engine and its arguments, as many engines as there are devices for."""
    rollout, like = cut.rollout, given.rollout
    rollout.engine, rollout.engine_args = like.engine, copy.deepcopy(like.engine_args)
    rollout.tensor_parallel = fit(like.tensor_parallel, devices)
    rollout.data_parallel = fit(like.data_parallel, devices // rollout.tensor_parallel)
    rollout.expert_parallel = like.expert_parallel
    groups = min(like.engines // like.data_parallel, devices // rollout.tensor_parallel // rollout.data_parallel)
    rollout.engines = max(1, groups) * rollout.data_parallel


def _sizes(cut: Recipe, given: Recipe) -> None:
    """Lengths and micro batches: with these, peaks are those of full micro batches, as a plan counts them."""
    cut.data.max_prompt_length = min(given.data.max_prompt_length, PROMPT)
    cut.rollout.max_response_length = min(given.rollout.max_response_length, RESPONSE)
    longest = longest_sample(cut)
    most = SEQUENCES * longest
    cut.actor.max_tokens_per_micro_batch = max(longest, min(given.actor.max_tokens_per_micro_batch, most))
    if uses_critic(given.algorithm):
        cut.critic.max_tokens_per_micro_batch = max(longest, min(given.critic.max_tokens_per_micro_batch, most))
    parallel = cut.megatron.tensor_parallel * cut.megatron.pipeline_parallel * cut.megatron.context_parallel
    ranks = cut.cluster.trainers // parallel
    cut.data.prompts_per_step = max(cut.data.prompts_per_step, cut.actor.mini_batches * ranks)


def _write_model(model: Path, config: dict[str, Any], source: Path, folder: Path) -> None:
    """Dummy weights in bfloat16, a file for each layer; the tokenizer and the other small files are the recipe's model's."""
    import torch
    from safetensors.torch import save_file

    try:
        tensors = list(shapes(config))
    except ValueError as error:
        raise CannotCut(str(error)) from error
    wanted, free = 2 * sum(math.prod(shape) for _, shape in tensors), shutil.disk_usage(folder).free
    if 2 * wanted > free:
        raise CannotCut(f"its weights take {wanted >> 30} GiB, and {folder} has {free >> 30} GiB free")
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
    text = json.dumps({"metadata": {"total_size": wanted}, "weight_map": index})
    (model / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    (model / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _values(torch: Any, tile: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor's dummy values: ones in norms, zeros in biases, else the tile again and again."""
    if len(shape) == 1:
        return torch.full(shape, float("norm" in name or name.endswith("ln_q.weight")), dtype=torch.bfloat16)
    count = math.prod(shape)
    return tile.repeat(-(-count // _TILE))[:count].reshape(shape)


def in_words(given: Recipe, cut: Recipe, config: dict[str, Any]) -> str:
    """The copy's layout beside the recipe's, for people: `TP4 PP2 EP2 ETP4 on 8 trainers (of 16), 4 layers`."""
    megatron = cut.megatron
    sizes = {
        "TP": megatron.tensor_parallel, "PP": megatron.pipeline_parallel, "CP": megatron.context_parallel,
        "EP": megatron.expert_parallel, "ETP": megatron.expert_tensor_parallel or 1,
    }  # fmt: skip
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
    trainers = f"{cut.cluster.trainers} trainers (the recipe: {given.cluster.trainers})"
    rollout = cut.rollout
    engines = f"{rollout.engines} engines of TP{rollout.tensor_parallel}" + (
        f" in groups of {rollout.data_parallel}" if rollout.data_parallel > 1 else ""
    )
    return f"{layout} on {trainers}, {engines}, {config['num_hidden_layers']} layers"
