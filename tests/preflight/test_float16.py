"""Models with activations beyond float16's range are refused before the start."""

from __future__ import annotations

import pytest

from megarl.errors import RecipeError
from megarl.hf import published
from megarl.preflight.models import policy_errors
from megarl.recipe.schema import Recipe


def refused(recipe: Recipe, model: str) -> list[tuple[str, str]]:
    recipe.model.path = model
    errors = policy_errors(recipe, published.read(model))
    return [
        (error.key, str(error))
        for error in errors
        if isinstance(error, RecipeError) and "float16's range" in str(error)
    ]


@pytest.mark.parametrize("key", ["model.dtype", "rollout.dtype"])
def test_gemma_is_refused(key: str) -> None:
    recipe = Recipe()
    section, _, name = key.partition(".")
    setattr(getattr(recipe, section), name, "float16")
    ((named, text),) = refused(recipe, "gemma-3-1b-it")
    assert named == key and "set it to bfloat16 or float32" in text
    assert not refused(recipe, "Qwen2.5-7B-Instruct")


def test_bfloat16_is_not() -> None:
    assert not refused(Recipe(), "gemma-3-1b-it")
