"""Checks and inputs of `megarl serve`, before any process starts. No training data is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import platform as platforms
from megarl.cluster.device_map import Demand
from megarl.data.tokenizer import Tokenizer
from megarl.errors import errors_of
from megarl.hf.config import context_length, text_fields
from megarl.megatron.extra_settings import check_extra_names
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.engines import check_engines
from megarl.preflight.engines_and_devices import check_device, check_installed, device_count_errors
from megarl.preflight.findings import Survey
from megarl.preflight.hub_inputs import fetch_inputs
from megarl.preflight.models import POLICY
from megarl.preflight.run_directory import run_directory_errors
from megarl.preflight.survey_models import check_models
from megarl.recipe import Recipe
from megarl.recipe.derived.lengths import longest_sample
from megarl.recipe.derived.served import served_recipe
from megarl.recipe.paths import with_absolute_paths


@dataclass(frozen=True)
class ServedModel:
    """A checked recipe (`served_recipe`) with what its model allows. Lengths are in tokens."""

    recipe: Recipe
    platform: Any
    tokenizer: Tokenizer
    config: dict[str, Any]  # config.json
    notices: list[str]
    directory: RunDirectory

    @property
    def vocab_size(self) -> int:
        size: int = text_fields(self.config)["vocab_size"]
        return size

    @property
    def longest_datum(self) -> int:
        """Most input tokens of a datum: the model's context length less the last target, or what the recipe samples."""
        return (context_length(self.config) or longest_sample(self.recipe) + 1) - 1

    @property
    def longest_sample(self) -> int:
        """Most tokens of a prompt with its response."""
        return longest_sample(self.recipe)

    @property
    def demand(self) -> Demand:
        """Devices of trainers and engines."""
        return Demand.of(self.recipe, trainers=True, engines=True)


def prepare_served_model(recipe: Recipe) -> ServedModel:
    """Check `recipe`, fetch and read its model, and lock the run's directory. Raises RecipeError or ValueError."""
    recipe = served_recipe(with_absolute_paths(recipe))
    inputs = [POLICY, "model.tokenizer", *(["lora.path"] if recipe.lora.rank else [])]
    fetched = fetch_inputs(recipe, inputs)
    recipe = fetched.recipe
    survey = Survey(recipe)
    survey.run_stage("settings", _check_settings)
    survey.run_stage("model", check_models)
    survey.raise_errors()
    assert survey.tokenizer is not None, "a survey without errors has read the tokenizer"
    platform = platforms.select(recipe.cluster.device)
    check_device(recipe, platform.name)
    check_installed(recipe)
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    notices = [*fetched.notices, *filter(None, [directory.lock()])]
    return ServedModel(recipe, platform, survey.tokenizer, survey.configs[POLICY], notices, directory)


def _check_settings(survey: Survey) -> None:
    recipe = survey.recipe
    survey.add(errors_of(check_engines, recipe.rollout), "rollout.engine")
    survey.add(errors_of(check_extra_names, recipe, "megatron"), "megatron.extra")
    survey.add(run_directory_errors(recipe, resumes=False), "runs_dir")
    demand = Demand.of(recipe, trainers=True, engines=True)
    survey.add(device_count_errors(recipe.cluster, demand), "cluster.trainers")
