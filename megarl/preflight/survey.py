"""Run every check that needs more than the recipe's values, and collect the findings.

`train` and `eval` raise the errors together, `plan` prints them with the checks that it could not run, and `doctor` adds
findings about the machine.
"""

from __future__ import annotations

from megarl import engines
from megarl import platform as platforms
from megarl.cluster.device_map import place
from megarl.engines.specs import fixed_models
from megarl.megatron.extra_settings import fields_of_megatron
from megarl.observe.webhook import webhook_url
from megarl.preflight.data import Prepared
from megarl.preflight.engines_and_devices import (
    check_device,
    demand_of,
    evaluation_setting_errors,
    training_setting_errors,
)
from megarl.preflight.findings import Available, Survey
from megarl.preflight.models import POLICY
from megarl.preflight.replay import replay_errors
from megarl.preflight.run_directory import run_directory_errors
from megarl.preflight.survey_data import check_data, check_sample, check_scorers, check_without_rows
from megarl.preflight.survey_models import check_configs, check_models
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.schema import Recipe
from megarl.recipe.text import hardware_of


def survey(recipe: Recipe, available: Available | None = None) -> Survey:
    """Run every check of `recipe` stage by stage, and return the survey with its findings.

    Data is read only if settings and models have no errors: reading takes long, and its checks would repeat these errors.
    """
    if available is not None and available.recipe_file is not None:
        recipe = with_cached_inputs(recipe)
    result = Survey(recipe, available)
    result.run_stage("settings", _check_settings)
    result.run_stage("model", check_models)
    if not result.errors:
        result.run_stage("data", check_sample if result.is_partial else check_data)
    elif not result.is_partial:
        result.run_stage("data", check_without_rows, whole=False)
    if result.prepared is not None:
        result.run_stage("rewards", check_scorers)
    if result.available.run:
        result.run_stage("run", _check_run, whole=False)
    return result


def _check_settings(survey: Survey) -> None:
    recipe = survey.recipe
    if not survey.available.training:
        survey.add(evaluation_setting_errors(recipe), "rollout.engine")
        return
    if recipe.observe.alerts.url is not None:
        with survey.part("observe.alerts.url"):
            webhook_url(recipe.observe.alerts)
    survey.add(training_setting_errors(recipe), "megatron.extra")
    if not survey.is_partial:
        return
    if recipe.cluster.device == "auto":  # `plan` plans for devices that this machine may lack
        with survey.part("megatron.extra"):
            demand_of(recipe).require_trainers_devices_suffice()
    with survey.part("rollout.tensor_parallel"):
        _check_machines(survey)
    _report_packages(survey)


def _check_machines(survey: Survey) -> None:
    """Raise ValueError if an engine needs more devices than the machine in the recipe's head has."""
    assert survey.available.recipe_file is not None
    machine = hardware_of(survey.available.recipe_file)
    if machine is not None:
        name, _, devices = machine
        demand = demand_of(survey.recipe)
        place([(name, devices)] * -(-demand.devices // devices), demand, "devices")


def _report_packages(survey: Survey) -> None:
    """Report settings of packages that are not installed: their names cannot be checked."""
    recipe = survey.recipe
    uses_rollout = recipe.train.source == "rollout"
    for section in [*(["rollout"] if uses_rollout else []), *fixed_models(recipe)]:
        settings = getattr(recipe, section)
        with survey.part(f"{section}.engine"):
            if settings.engine_args and not engines.arguments_of(settings.engine).fields():
                survey.unavailable(f"{section}.engine_args: {settings.engine} is not installed here")
    if recipe.megatron.extra and fields_of_megatron() is None:
        survey.unavailable("megatron.extra: Megatron is not installed here")


def _check_run(survey: Survey) -> None:
    survey.add(run_directory_errors(survey.recipe), "runs_dir")
    survey.add(replay_errors(survey.recipe), "train.replay")
    if POLICY in survey.configs:
        with survey.part("cluster.device"):
            check_device(survey.recipe, platforms.kind(survey.recipe.cluster.device))


def prepare_training(recipe: Recipe) -> Prepared:
    """Return the tokenizer and data of `train`. Raises all errors together: RecipeError if a key causes them, else ValueError."""
    return _prepare(recipe, Available(run=True))


def prepare_evaluation(recipe: Recipe) -> Prepared:
    """Return the tokenizer and data of `eval`. Raises as `prepare_training` does."""
    return _prepare(recipe, Available(training=False))


def check_without_weights(recipe: Recipe, *, training: bool = True) -> None:
    """Raise the errors of settings and of each model's config.json together, before weights and rows are downloaded."""
    result = Survey(recipe, Available(training=training))
    result.run_stage("settings", _check_settings)
    result.run_stage("model", check_configs)
    result.raise_errors()


def _prepare(recipe: Recipe, available: Available) -> Prepared:
    result = survey(recipe, available)
    result.raise_errors()
    assert result.prepared is not None, "a survey without errors has read the data"
    return result.prepared
