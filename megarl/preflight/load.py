"""Load a recipe: read it (`recipe/load.py`) and check its values. Errors name the file that set a wrong value."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.correction import corrects
from megarl.algorithms.rejection import of_icepop
from megarl.data.chat_template import read_template
from megarl.errors import RecipeError, errors_of, raise_all
from megarl.hf.families.tables.family_table import table_text
from megarl.preflight.recipe.algorithm import name_errors
from megarl.preflight.recipe.general import recipe_errors
from megarl.recipe.algorithm import AlgorithmConfig, CorrectionConfig
from megarl.recipe.data import DataConfig
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import ModelConfig


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, check: bool = True) -> Recipe:
    """Read the recipe at `path`, apply dotted `overrides` ("rollout.temperature=0.7") and check it.

    Imports the user's modules. Settings that the recipe leaves open have the defaults of its loss.
    Raises RecipeError for a missing file, YAML that does not parse, unknown keys, wrong types and, with `check`, values and
    combinations that cannot work. All independent errors are raised together, as RecipeErrors if there is more than one.
    """
    reading = read_recipe(path, overrides)
    errors: list[ValueError] = [*reading.errors]
    names = list(name_errors(reading.recipe.algorithm))  # imports the user's modules
    apply_loss_defaults(reading.recipe.algorithm, reading.origins)
    apply_icepop(reading.recipe.algorithm.correction, reading.origins)
    apply_quantization(reading.recipe, reading.origins)
    errors += errors_of(_read_chat_template, reading.recipe.data, reading.origins)
    errors += errors_of(_read_family_table, reading.recipe.model, reading.origins)
    if check:
        for error in recipe_errors(reading.recipe, names):
            if isinstance(error, RecipeError):
                error.origin = reading.origins.get(error.key, f"{path} (default value)")
            errors.append(error)
    raise_all(errors)
    return reading.recipe


def _read_chat_template(data: DataConfig, origins: Mapping[str, str]) -> None:
    """Replace a file in `data.chat_template` by its text, so that other machines, resumes and exports have it."""
    key, value = "data.chat_template", data.chat_template
    try:
        data.chat_template = read_template(value)
    except ValueError as error:
        remedy = "give a .jinja file, the text of a template, a name such as chatml, true or false"
        raise RecipeError(key, str(error), remedy, value=value, origin=origins.get(key)) from error


def _read_family_table(model: ModelConfig, origins: Mapping[str, str]) -> None:
    """Replace a file in `model.table` by its text, so that other machines and resumes have it."""
    key, value = "model.table", model.table
    if value is None:
        return
    try:
        model.table = table_text(value)
    except ValueError as error:
        remedy = "write it with `megarl model table MODEL --out FILE`"
        raise RecipeError(key, str(error), remedy, value=value, origin=origins.get(key)) from error


def apply_loss_defaults(algorithm: AlgorithmConfig, keys: Container[str]) -> None:
    """Set the defaults of `algorithm.loss` that are not among `keys`, the dotted keys that the recipe sets.

    The modules of `algorithm.modules` must be imported. A loss that is not registered has no defaults.
    """
    if algorithm.loss not in LOSSES:
        return
    for name, value in LOSSES[algorithm.loss].defaults.items():
        if f"algorithm.{name}" not in keys:
            setattr(algorithm, name, value)


def apply_icepop(correction: CorrectionConfig, keys: Container[str]) -> None:
    """Set what `icepop` stands for, unless the recipe sets it, by `keys`; the recipe check compares the two."""
    if correction.icepop is None:
        return
    try:
        values = of_icepop(correction)
    except ValueError:  # the recipe check reports it
        return
    for name in ("weights", "truncate"):
        if f"algorithm.correction.{name}" not in keys:
            setattr(correction, name, values[name])
    correction.reject = {**values["reject"], **correction.reject}


def apply_quantization(recipe: Recipe, keys: Container[str]) -> None:
    """Set `algorithm.correction.weights: token` if engines are quantized (`rollout.quantization`), unless the recipe sets the
    weights, by `keys`, or another correction.

    With `algorithm.old_log_probs: rollout`, the loss's ratio already is p(trainer) / p(engine).
    """
    correction = recipe.algorithm.correction
    is_set = "algorithm.correction.weights" in keys or corrects(correction)
    samples = recipe.train.source == "rollout" and recipe.algorithm.old_log_probs != "rollout"
    if recipe.rollout.quantization is not None and samples and not is_set:
        correction.weights = "token"
