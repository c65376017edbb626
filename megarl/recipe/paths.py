"""Paths of a recipe, for example as absolute ones, and the recipes that come with megarl."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

import megarl
from megarl.errors import InputError, RecipeError
from megarl.hf import hub
from megarl.recipe.hub_inputs import with_inputs
from megarl.recipe.schema import Recipe
from megarl.registry import nearest

_QUICKSTART = "quickstart.yaml"
_INSTALLED = f"share/megarl/recipes/{_QUICKSTART}"  # below the environment: [options.data_files] in setup.cfg


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, which do not depend on the directory a process starts in.

    Names of models on the hub get `hf://` in front.
    """

    def named(_: str, path: str) -> str:
        return path if path.startswith(hub.PREFIX) else str(hub.model_name(path) or path)

    recipe = with_inputs(recipe, named, lambda _, files: files)
    return with_paths(recipe, lambda path: os.path.abspath(os.path.expanduser(path)))


def with_paths(recipe: Recipe, convert: Callable[[str], str]) -> Recipe:
    """Return the recipe with each path replaced by `convert(path)`: models, data, run directories, files of functions.

    Names on the hub (`hf://...`) are not paths and stay as they are.
    """

    def convert_file(function: str) -> str:
        """Convert the path of `file.py:function` or of a YAML file of tools; other names are unchanged."""
        file, colon, name = function.partition(":")
        return f"{convert(file)}{colon}{name}" if file.endswith((".py", ".yaml", ".yml")) else function

    def convert_or_none(path: str | None) -> str | None:
        return convert(path) if path else None

    def convert_model(_: str, path: str) -> str:
        return path if path.startswith(hub.PREFIX) else convert(path)

    def convert_files(_: str, files: list[str]) -> list[str]:
        return [file if file.startswith(hub.PREFIX) else convert(file) for file in files]

    weight_sync, reward = recipe.weight_sync, recipe.reward
    return dataclasses.replace(
        with_inputs(recipe, convert_model, convert_files),
        runs_dir=convert(recipe.runs_dir),
        train=dataclasses.replace(recipe.train, replay=convert_or_none(recipe.train.replay)),
        weight_sync=dataclasses.replace(weight_sync, directory=convert_or_none(weight_sync.directory)),
        agent=dataclasses.replace(
            recipe.agent,
            tools=[convert_file(tool) for tool in recipe.agent.tools],
            interaction=convert_file(recipe.agent.interaction) if recipe.agent.interaction else None,
            loop=convert_file(recipe.agent.loop) if recipe.agent.loop else None,
        ),
        reward=dataclasses.replace(
            reward,
            function=convert_file(reward.function) if reward.function else None,
            functions={convert_file(name): weight for name, weight in reward.functions.items()},
        ),
    )


def recipes_folder(package: Path = Path(megarl.__file__).parent) -> Path:
    """Return the folder of the recipes, relative to the current folder if it is below it.

    package: the folder of the imported package. Raises InputError if neither a checkout nor an installed wheel has them.
    """
    checkout = package.parent / "recipes"
    if (checkout / _QUICKSTART).is_file():
        return checkout.relative_to(Path.cwd()) if checkout.is_relative_to(Path.cwd()) else checkout
    for found in importlib.metadata.distributions(name="megarl", path=[str(package.parent)]):
        for file in found.files or ():
            if file.as_posix().endswith(_INSTALLED) and (path := Path(str(file.locate())).resolve()).is_file():
                return path.parent
    raise InputError(
        f"the recipes of megarl are missing: {package} is neither in a checkout nor from a complete wheel. Install the wheel again, "
        "or run the command in a clone of the repository"
    )


def shipped_recipes(name: str) -> list[Path]:
    """Return the files among megarl's recipes that the relative path `name` ends with, without `..`; [] if megarl has no recipes."""
    parts = tuple(part for part in Path(name).parts if part != "..")
    try:
        files = sorted(recipes_folder().rglob("*.yaml"))
    except InputError:
        return []
    return [file for file in files if parts and file.parts[-len(parts) :] == parts]


def missing_base(base: str, child: Path) -> RecipeError:
    """Return the error for a `base` of the file `child` that does not exist. Often the recipe is a copy, without its base files."""
    file = Path(os.path.abspath(child.parent / base))
    state = f"{file} is not a file" if file.exists() else f"the file {file} does not exist"
    problem = f"{state}; a base is relative to the folder of the file that names it"
    shipped = [str(each.absolute()) for each in shipped_recipes(base)]
    near = nearest(
        file.stem, {each.stem: each for each in file.parent.glob("*.yaml") if each.resolve() != child.resolve()}
    )
    remedy = "write a path from that folder, or an absolute one"
    if shipped:
        remedy = f"if you mean a recipe of megarl, write base: {' or base: '.join(shipped)}; else {remedy}"
    elif near:
        remedy = f"did you mean {file.with_name(near + file.suffix)}? Otherwise {remedy}"
    return RecipeError("base", problem, remedy, value=base, origin=str(child))
