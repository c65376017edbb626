"""Check and read everything that `train` and `eval` need before any process starts.

An error ends the command within seconds with exit status 2.
"""

from __future__ import annotations

from megarl.preflight.data import Prepared
from megarl.preflight.findings import Available
from megarl.preflight.survey import survey
from megarl.recipe.schema import Recipe


def prepare_training(recipe: Recipe) -> Prepared:
    """Return the tokenizer and data of `train`. Raises all errors together: RecipeError if a key causes them, else ValueError."""
    return _prepare(recipe, Available(run=True))


def prepare_evaluation(recipe: Recipe) -> Prepared:
    """Return the tokenizer and data of `eval`. Raises as `prepare_training` does."""
    return _prepare(recipe, Available(training=False))


def _prepare(recipe: Recipe, available: Available) -> Prepared:
    result = survey(recipe, available)
    result.raise_errors()
    assert result.prepared is not None, "a survey without errors has read the data"
    return result.prepared
