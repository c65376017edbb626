"""megarl: reinforcement learning of large language models on Megatron.

>>> from megarl import load_recipe, train
>>> train(load_recipe("recipes/quickstart.yaml", ["train.steps=2"]))

docs/architecture.md says what each folder is for, and follows a step through the code.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from megarl.batching.datums import AdamParams, Datum
    from megarl.preflight.load import load_recipe
    from megarl.recipe import Recipe, RecipeError

__version__ = "0.1.0"
__all__ = [
    "AdamParams",
    "Datum",
    "Recipe",
    "RecipeError",
    "SamplingParams",
    "TrainingSession",
    "load_recipe",
    "train",
]
_HOMES = {
    "AdamParams": "megarl.batching.datums",
    "Datum": "megarl.batching.datums",
    "Recipe": "megarl.recipe",
    "RecipeError": "megarl.recipe",
    "SamplingParams": "megarl.commands.serve.session",
    "TrainingSession": "megarl.commands.serve.session",
    "load_recipe": "megarl.preflight.load",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use: `import megarl` stays fast, and Ctrl-C during imports is reported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def train(recipe: Recipe) -> Path:
    """Train by `recipe` and return the run's directory. See `megarl.train.train`."""
    from megarl.train import train as run_training

    return run_training(recipe)


_MOVED = {"megarl.config": "megarl.recipe", "megarl.tools": "megarl.agents"}


class _MovedModules:
    """Import finder and loader for old paths in users' code: names of the new module, with a FutureWarning."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls()) if name in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        new = _MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}: change the import", FutureWarning, stacklevel=2)
        public = {name: value for name, value in vars(importlib.import_module(new)).items() if name[:2] != "__"}
        module.__dict__.update(public, __getattr__=__getattr__)  # load_recipe is now in megarl


sys.meta_path.append(_MovedModules)
