"""Checks of the models that a recipe names: config.json, weight files and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl import platform as platforms
from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import needs_teacher, teacher_top_k
from megarl.data.tokenizer import Tokenizer, check_same_tokens, check_vocabulary, load_tokenizer
from megarl.errors import NotHereError, RecipeError, as_recipe_error, command_name, errors_of
from megarl.hf import hub, published, weights
from megarl.hf.adapters import adapter_faults
from megarl.hf.config import context_length, text_fields
from megarl.hf.families import find_family, has_tower
from megarl.hf.families.check import check_model, check_sizes
from megarl.hf.families.tables.family_table import read_table, with_critic_table, with_table, without_table
from megarl.megatron.extra_settings import check_extra
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.platform.kinds import kind_of
from megarl.preflight.engines import check_experts, check_heads, check_quantization, overrides_config
from megarl.recipe.data import DataConfig
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.lengths import longest_sample, longest_scored_sample
from megarl.recipe.schema import Recipe
from megarl.recipe.text import shape_of
from megarl.recipe.trainers import LoraConfig, ModelConfig

Config = dict[str, Any]
POLICY, CRITIC, JUDGE_PATH = "model.path", "critic.model_path", "judge.path"
_REMEDIES = {  # for a missing model directory, by the last parts of its path; an argument is the command
    "data/quickstart/model": "run `{} data quickstart --out data/quickstart` to make it",
    "runs/quickstart-sft/hf": "run `{} quickstart`, whose SFT run makes it",
}


def models_of(recipe: Recipe) -> dict[str, str]:
    """Return the directory of each model that the run reads, by its setting. The policy comes first."""
    directories = {POLICY: recipe.model.path}
    if uses_critic(recipe.algorithm) and recipe.critic.model_path:
        directories[CRITIC] = recipe.critic.model_path
    if needs_teacher(recipe.algorithm):
        directories |= {key: str(teacher.path) for key, teacher in recipe.teacher.by_key.items()}
    if recipe.asks_judge:
        directories[JUDGE_PATH] = str(recipe.judge.path)
    return directories


# --- reading ---------------------------------------------------------------------------------------------------------


def config_of(path: str, recipe: Path, key: str = POLICY, name: str | None = None) -> Config:
    """Return the config.json of the model at `path`, the value of the setting `key` in the recipe file `recipe`.

    The first source that exists is used: `name` (a published model, a folder or a name on the hub), `path`, the published
    model with the directory's name, the published model in the recipe's head, config.json on the hub.

    Raises NotHereError if no source exists, and RecipeError for a file that cannot be read.
    """
    if name is not None and Path(name).is_dir():
        return read_hf_config(name, key)
    if name is None and Path(path).is_dir():
        return read_hf_config(path, key)
    last = Path(path).name.partition("@")[0]
    shape = name or (last if last in published.names() else shape_of(recipe, key))
    if shape not in published.names() and (on_hub := _hub_model(key, name or path)) is not None:
        return read_hf_config(_fetch_config(key, on_hub), key)
    if shape is None:
        raise NotHereError(
            key,
            f"the directory does not exist (working directory: {Path.cwd()}), and neither its name nor the recipe's head names "
            "a published model",
            "make the model first; or name a published model in an option of the command or in a line "
            f"`# Shape{'' if key == POLICY else f' of {key}'}: NAME` of the recipe, such as {published.similar(path)}",
            value=path,
        )
    try:
        return published.read(shape)
    except ValueError as error:
        raise RecipeError(key, str(error), "name a published model", value=path) from error


def policy_config_of(model: ModelConfig, file: Path, name: str | None = None) -> Config:
    """Return config.json of the policy as `config_of` does, with the table of `model.table` in it. Raises RecipeError."""
    return with_family_table(config_of(model.path, file, name=name), model)


def with_family_table(config: Config, model: ModelConfig, key: str = POLICY) -> Config:
    """Return config.json with the table of `model.table` in it. Raises RecipeError.

    key: of the model's path. A critic has the table only if it is of the table's type.
    """
    if model.table is None:
        return config
    with as_recipe_error("model.table", "write it with `megarl model table MODEL --out FILE`", model.table):
        add = with_critic_table if key == CRITIC else with_table
        return add(config, read_table(model.table))


def _hub_model(key: str, text: str) -> hub.HubName | None:
    try:
        return hub.model_name(text)
    except hub.HubError as error:
        raise RecipeError(key, error.problem, error.remedy, value=text) from error


def _fetch_config(key: str, name: hub.HubName) -> str:
    """Return the folder of a hub model's config.json in the cache, which alone is fetched if it is missing."""
    try:
        return str(hub.config_folder(name))
    except hub.HubError as error:
        remedy = f"{error.remedy}; to plan without it, add a line `# Shape: NAME` with a published model to the recipe"
        raise NotHereError(key, error.problem, remedy, value=str(name)) from error


def _missing_remedy(path: str) -> str:
    """Return the remedy for the missing model directory `path`."""
    end = "/".join(Path(path).parts[-3:])
    if end in _REMEDIES:
        return _REMEDIES[end].format(command_name())
    return (
        "download or make it (the head of a recipe of megarl has the command), or give another Hugging Face directory with its "
        "config.json, or a name on the hub (OWNER/NAME)"
    )


LARGEST_SIZES = {
    "num_hidden_layers": 10_000, "hidden_size": 1_000_000, "intermediate_size": 10_000_000, "vocab_size": 10_000_000,
    "num_attention_heads": 100_000, "num_experts": 100_000, "n_routed_experts": 100_000,
}  # fmt: skip
"""Bounds far above any model: a damaged config.json would otherwise take all memory of the check."""


def read_hf_config(path: str, key: str = POLICY) -> Config:
    """Return config.json of the Hugging Face directory `path`, the value of the setting `key`. A family's table in it is left out.

    Raises RecipeError.
    """
    directory = Path(path)
    if path.startswith(hub.PREFIX):
        on_hub = _hub_model(key, path)
        assert on_hub is not None, "the prefix stands for the hub"
        remedy = f"`train` and `eval` download it; to do it now, run `{hub.download_command(on_hub, 'model')}`"
        raise NotHereError(key, "it is not in this machine's cache of the hub", remedy, value=path)
    if not directory.is_dir():
        problem = f"the directory does not exist (working directory: {Path.cwd()})"
        raise RecipeError(key, problem, _missing_remedy(path), value=path)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "give a Hugging Face directory: config.json, *.safetensors and a tokenizer"
        raise RecipeError(key, "it contains no config.json", remedy, value=path) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(key, f"its config.json is not valid JSON: {error}", "correct the file", value=path) from error
    except OSError as error:
        problem = f"its config.json cannot be read: {error.strerror}"
        raise RecipeError(key, problem, "make it readable", value=path) from error
    if not isinstance(config, dict):
        raise RecipeError(key, "its config.json is not a JSON object", "give the model's own file", value=path)
    for name, most in LARGEST_SIZES.items():
        size = text_fields(config).get(name)
        if isinstance(size, (int, float)) and not 0 <= size <= most:
            problem = f"its config.json has {name} {size}, and megarl reads 0 to {most:,}"
            raise RecipeError(key, problem, "give the model's own file", value=path)
    return without_table(config)


def read_weights_config(path: str, key: str) -> Config:
    """Return config.json as `read_hf_config` does, and check that the directory has complete weights."""
    config = read_hf_config(path, key)
    if not any(Path(path).glob("*.safetensors")):
        remedy = "convert the weights to safetensors (save_pretrained does)"
        raise RecipeError(key, "it contains no *.safetensors", remedy, value=path)
    fault = weights.find_fault(Path(path), int(text_fields(config).get("num_hidden_layers") or 0))
    if fault is not None:
        raise RecipeError(key, fault, "download or convert the model again", value=path)
    return config


def read_tokenizer(model: ModelConfig, config: Config, chat_template: bool | str = True) -> Tokenizer:
    """Return the policy's tokenizer with the template of `data.chat_template`, checked against the vocabulary of `config`, its config.json. Raises RecipeError."""
    key, path = ("model.tokenizer", model.tokenizer) if model.tokenizer else (POLICY, model.path)
    with as_recipe_error(
        key, "give a directory with the model's own tokenizer (in model.tokenizer if it is separate)", path
    ):
        tokenizer = load_tokenizer(path, model.path, chat_template)
        check_vocabulary(tokenizer, config)
    return tokenizer


# --- checks of config.json --------------------------------------------------------------------------------------------


def policy_errors(recipe: Recipe, config: Config) -> Iterator[ValueError]:
    """Yield errors of a policy that cannot be trained or sampled from. `config`: its config.json."""
    model_errors = list(errors_of(check_known_model, config, POLICY, recipe.model.path))
    yield from model_errors
    if model_errors:  # the checks below read fields that may be missing
        return
    yield from errors_of(check_layout, config, recipe.megatron, recipe.cluster.trainers)
    yield from errors_of(check_lora, config, recipe.lora, recipe.megatron)
    yield from errors_of(check_extra, recipe, config, "megatron")
    yield from errors_of(_check_tower, recipe.model, config)
    if recipe.model.dtype == "float16":
        yield from _float16_errors(config, "model.dtype")
    if recipe.train.source == "rollout":
        yield from sampled_errors(recipe, config)


def adapter_errors(lora: LoraConfig, config: Config) -> Iterator[ValueError]:
    """Yield errors of the adapter in `lora.path` that training starts from. `config`: config.json of the policy."""
    assert lora.path is not None
    if not Path(lora.path).is_dir():
        problem = f"the directory does not exist (working directory: {Path.cwd()})"
        yield RecipeError(
            "lora.path", problem, "give a PEFT directory, or a name on the hub (OWNER/NAME)", value=lora.path
        )
        return
    with as_recipe_error("lora.path", "give the directory that PEFT's save_pretrained wrote", lora.path):
        for key, problem, remedy in adapter_faults(Path(lora.path), config, lora.rank, lora.alpha, lora.targets):
            yield RecipeError(key, problem, remedy, value=getattr(lora, key.removeprefix("lora.")))


def sampled_errors(recipe: Recipe, config: Config) -> Iterator[ValueError]:
    """Yield errors of a model that its engines cannot sample from."""
    yield from errors_of(_check_context, recipe, config)
    yield from errors_of(_check_pixels, recipe.data, config)
    if update_rule(recipe) == "keep" and has_tower(config):
        yield RecipeError(
            "rollout.at_update",
            "engines cache encoded images without the version of the weights, so later requests would reuse old encodings",
            "set rollout.at_update=refresh, or drain",
            value="keep",
        )
    if recipe.rollout.dtype == "float16":
        yield from _float16_errors(config, "rollout.dtype")
    yield from errors_of(check_cpu_engine, recipe, config)
    yield from errors_of(check_experts, recipe.rollout, config)
    yield from errors_of(check_quantization, recipe.rollout, config)
    yield from errors_of(check_heads, "rollout", recipe.rollout, config, spread=recipe.rollout.spreads_experts)


def check_cpu_engine(
    recipe: Recipe, config: Config, remedy: str = "set it to cuda, or train by SFT, without engines (train.source=sft)"
) -> None:
    """Raise RecipeError if the recipe samples on a CPU, and vLLM's CPU build lacks a part of the model.

    config: the model's config.json. remedy: what the error proposes.
    """
    kind, family = text_fields(config)["model_type"], find_family(config)
    lacking = family.no_cpu_engine if family else ""
    accelerator = kind_of(platforms.kind(recipe.cluster.device)).accelerator
    if lacking and not accelerator and recipe.train.source == "rollout":
        problem = f"vLLM's CPU build has no {lacking}, so it cannot sample from {kind}"
        raise RecipeError("cluster.device", problem, remedy, value=recipe.cluster.device)


def _float16_errors(config: Config, key: str) -> Iterator[RecipeError]:
    """Yield an error for a model with activations beyond float16's range. Source: _FLOAT16_NOT_SUPPORTED_MODELS of vllm/config/model.py."""
    kind = str(config.get("model_type"))
    if kind in ("gemma2", "gemma3", "gemma3_text", "glm4"):
        problem = f"activations of {kind} leave float16's range, and vLLM refuses it"
        yield RecipeError(key, problem, "set it to bfloat16 or float32", value="float16")


def critic_errors(recipe: Recipe, config: Config) -> Iterator[ValueError]:
    """Yield errors of the critic's model and its layout. `config`: its config.json."""
    view = critic_view(recipe)
    key = CRITIC if recipe.critic.model_path else POLICY
    if recipe.model.table is not None and find_family(config) is None:
        kind = read_table(recipe.model.table)["model_type"]
        problem = f"it is a {config.get('model_type')!r} model without a table: megarl has none, and model.table is of {kind} models"
        remedy = f"name a {kind} model, or one of a type that megarl has a table for (docs/models.md)"
        yield RecipeError(key, problem, remedy, value=view.model.path)
        return
    model_errors = list(errors_of(check_known_model, config, key, view.model.path))
    yield from model_errors
    if model_errors:
        return
    if has_tower(config):
        remedy = "name a language model in critic.model_path, or use another algorithm.advantage"
        yield RecipeError(key, "a vision-language model cannot be a critic yet", remedy, value=view.model.path)
        return
    for error in errors_of(check_layout, config, view.megatron, view.cluster.trainers):
        text = str(error).replace("megatron.", "critic.megatron.").replace("cluster.trainers", "critic.trainers")
        yield ValueError(f"The critic cannot be laid out: {text}")
    yield from errors_of(check_extra, view, config, "critic.megatron")


def check_teacher(recipe: Recipe, key: str, config: Config) -> None:
    """Raise RecipeError for a teacher that cannot read the policy's samples. `key`: of its path; `config`: its config.json."""
    teacher, context = recipe.teacher.by_key[key], context_length(config)
    with as_recipe_error(key, "give the teacher's own config.json", teacher.path):
        check_sizes(config)
    check_heads("teacher", teacher, config)
    longest = longest_scored_sample(recipe)
    if context is not None and longest > context and not overrides_config(teacher):
        raise RecipeError(
            key,
            f"it reads samples of data.max_prompt_length + rollout.max_response_length + 1 = {longest} tokens, and its context "
            f"is {context} (max_position_embeddings of its config.json)",
            "lower the two, or name a teacher with a longer context",
            value=teacher.path,
        )


def check_teacher_tokens(recipe: Recipe, key: str, tokenizer: Tokenizer, config: Config) -> None:
    """Raise RecipeError if a teacher's vocabulary differs from the policy's. Loads the teacher's tokenizer. `key`: of its path."""
    path = str(recipe.teacher.by_key[key].path)
    with as_recipe_error(key, "name a teacher of the policy's family, with its own tokenizer", path):
        check_same_tokens(tokenizer, load_tokenizer(path))
        check_vocabulary(tokenizer, config)
    top_k = teacher_top_k(recipe.algorithm)
    if top_k > tokenizer.vocab_size:
        problem = f"the tokenizer in {tokenizer.directory} has {tokenizer.vocab_size} tokens"
        raise RecipeError("algorithm.distill_top_k", problem, f"set it to at most {tokenizer.vocab_size}", value=top_k)


def check_known_model(config: Config, key: str, path: str) -> None:
    """Raise RecipeError for a model that the trainer would compute differently from the engine, or not at all."""
    with as_recipe_error(key, "name a model that megarl trains, or change its config.json accordingly", path):
        check_model(config)
        check_sizes(config)


def _check_context(recipe: Recipe, config: Config) -> None:
    """Raise RecipeError for samples longer than the policy's context. Engines would refuse them when they load."""
    context, data, rollout = context_length(config), recipe.data, recipe.rollout
    longest = longest_sample(recipe)
    if context is None or overrides_config(rollout) or longest <= context:
        return
    raise RecipeError(
        "rollout.max_response_length",
        f"with data.max_prompt_length = {data.max_prompt_length} a sample may have {longest} tokens, and the model's context "
        f"is {context} (max_position_embeddings of its config.json)",
        f"lower the two to a sum of at most {context}",
        value=rollout.max_response_length,
    )


def _check_tower(model: ModelConfig, config: Config) -> None:
    """Raise RecipeError if the recipe freezes a vision tower that the model lacks."""
    if model.freeze_vision_tower and not has_tower(config):
        raise RecipeError("model.freeze_vision_tower", "the model reads no images", "leave it out", value=True)


def _check_pixels(data: DataConfig, config: Config) -> None:
    """Raise RecipeError for limits of image sizes if the model reads no images."""
    for name in ("min_pixels", "max_pixels"):
        if (value := getattr(data, name)) is not None and not has_tower(config):
            raise RecipeError(f"data.{name}", "the model reads no images", "leave it out", value=value)
