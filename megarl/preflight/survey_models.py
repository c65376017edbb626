"""The stage `model` of the survey: run the checks of models.py on every model of a recipe, and collect the findings."""

from __future__ import annotations

from pathlib import Path

from megarl.algorithms.advantages import uses_critic
from megarl.cluster import transport
from megarl.data.tokenizer import check_vocabulary, load_tokenizer
from megarl.errors import RecipeError, as_recipe_error
from megarl.hf.families.tables.family_table import FIELD, table_notice
from megarl.preflight.engines_and_devices import check_device
from megarl.preflight.findings import Survey
from megarl.preflight.judge import check_judge_model
from megarl.preflight.models import (
    CRITIC,
    JUDGE_PATH,
    POLICY,
    Config,
    adapter_errors,
    check_teacher,
    check_teacher_tokens,
    config_of,
    critic_errors,
    models_of,
    policy_config_of,
    policy_errors,
    read_hf_config,
    read_tokenizer,
    read_weights_config,
    sampled_errors,
    with_family_table,
)
from megarl.preflight.recipe.critic import ONE_LAYOUT


def check_configs(survey: Survey) -> None:
    """Read each model's config.json and check settings against it."""
    for key, directory in models_of(survey.recipe).items():
        if survey.available.training or key in (POLICY, JUDGE_PATH):
            with survey.part(key, needed=key in (POLICY, CRITIC)):
                survey.configs[key] = _config_of(survey, key, directory)
    _check_settings_against(survey)


def check_models(survey: Survey) -> None:
    recipe = survey.recipe
    training = survey.available.training
    check_configs(survey)
    if survey.is_partial and survey.errors:
        return  # checks of the files would repeat these errors
    device = recipe.cluster.device
    if survey.is_partial and device != "auto" and Path(recipe.model.path).is_dir():
        with survey.part("cluster.device"):
            check_device(recipe, device)
    _check_policy_files(survey)
    if training and recipe.lora.rank and recipe.lora.path:
        _check_adapter(survey, recipe.lora.path)
    for key in [key for key in survey.configs if key != POLICY]:
        _check_other_files(survey, key)
    if training and uses_critic(recipe.algorithm) and not survey.is_partial:
        _check_critic_tokens(survey)


def _config_of(survey: Survey, key: str, directory: str) -> Config:
    file = survey.available.recipe_file
    if key == POLICY and file is not None:
        return policy_config_of(survey.recipe.model, file, survey.available.shape)
    if key == POLICY:
        return with_family_table(read_hf_config(directory, key), survey.recipe.model)
    config = read_hf_config(directory, key) if file is None else config_of(directory, file, key)
    return with_family_table(config, survey.recipe.model, key) if key == CRITIC else config


def _check_settings_against(survey: Survey) -> None:
    """Check settings against each config.json: layout, adapters, context length, parallel sizes of engines."""
    recipe, policy = survey.recipe, survey.configs.get(POLICY)
    if policy is not None:
        if FIELD in policy and survey.is_partial:  # otherwise `check_data` adds it to the notices of the run
            survey.notice(table_notice(policy[FIELD]))
        if not survey.available.training:
            survey.add(sampled_errors(recipe, policy), POLICY)
        else:
            survey.add(policy_errors(recipe, policy), "megatron")
            critic = survey.configs.get(CRITIC) if recipe.critic.model_path else policy
            if uses_critic(recipe.algorithm) and critic is not None:
                survey.add(critic_errors(recipe, critic), "critic.megatron")
    for key in [key for key in recipe.teacher.by_key if key in survey.configs]:
        with survey.part(key):
            check_teacher(recipe, key, survey.configs[key])
    if JUDGE_PATH in survey.configs:
        with survey.part(JUDGE_PATH):
            check_judge_model(recipe.judge, survey.configs[JUDGE_PATH])


def _check_policy_files(survey: Survey) -> None:
    """Check the policy's weights, and load its tokenizer."""
    recipe = survey.recipe
    if POLICY not in survey.configs:
        return
    if _is_here(survey, recipe.model.path, POLICY, "its weights and tokenizer"):
        with survey.part(POLICY):
            read_weights_config(recipe.model.path, POLICY)
    separate, folder = recipe.model.tokenizer, Path(recipe.model.path)
    if survey.is_partial:
        if separate is None and (not folder.is_dir() or _holds_only_config(folder)):
            return
        if separate is not None and not _is_here(survey, separate, "model.tokenizer", "the tokenizer"):
            return
    with survey.part(POLICY):
        survey.tokenizer = read_tokenizer(recipe.model, survey.configs[POLICY], recipe.data.chat_template)


def _check_adapter(survey: Survey, folder: str) -> None:
    """Check the adapter that training starts from against the recipe and the policy."""
    if POLICY in survey.configs and _is_here(survey, folder, "lora.path", "the adapter"):
        with survey.part("lora.path"):
            survey.add(adapter_errors(survey.recipe.lora, survey.configs[POLICY]), "lora.path")


def _check_other_files(survey: Survey, key: str) -> None:
    """Check weights and tokenizer of critic, teacher or judge. `check_judge` checks the judge's question, with the data."""
    directory = models_of(survey.recipe)[key]
    if not _is_here(survey, directory, key, "its weights and tokenizer"):
        return
    with survey.part(key):
        read_weights_config(directory, key)
        if key in survey.recipe.teacher.by_key and survey.tokenizer is not None:
            check_teacher_tokens(survey.recipe, key, survey.tokenizer, survey.configs[key])
        elif key == JUDGE_PATH:
            load_tokenizer(directory)


def _check_critic_tokens(survey: Survey) -> None:
    recipe = survey.recipe
    key = CRITIC if recipe.critic.model_path else POLICY
    with survey.part(key):
        if transport(recipe.cluster) == "torchrun":
            remedy = "start it without torchrun"
            raise RecipeError("cluster.transport", ONE_LAYOUT, remedy, value=recipe.cluster.transport)
        if key in survey.configs and survey.tokenizer is not None:
            with as_recipe_error(key, "name a model with the policy's tokens", models_of(recipe)[key]):
                check_vocabulary(survey.tokenizer, survey.configs[key])


def _is_here(survey: Survey, directory: str, key: str, files: str) -> bool:
    if not survey.is_partial:
        return True
    if not Path(directory).is_dir():
        survey.unavailable(f"{key}: {directory} is not on this machine: {files}")
        return False
    if _holds_only_config(Path(directory)):
        survey.unavailable(f"{key}: {directory} has only a config.json: {files}")
        return False
    return True


def _holds_only_config(directory: Path) -> bool:
    """Return whether a folder has a config.json but no weights and no tokenizer, which is enough for `plan` alone."""
    names = {file.name for file in directory.iterdir()}
    return "config.json" in names and not any(
        name.endswith((".safetensors", ".bin", ".safetensors.index.json")) or name.startswith("tokenizer")
        for name in names
    )
