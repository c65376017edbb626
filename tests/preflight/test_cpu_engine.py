"""Models that vLLM's CPU build cannot sample from are refused before the start."""

from __future__ import annotations

import pytest

from megarl.errors import RecipeError
from megarl.hf import published
from megarl.preflight.models import sampled_errors
from megarl.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("model", "device", "source", "refused"),
    [
        ("DeepSeek-V3.2", "cpu", "rollout", True),
        ("MiniMax-M2", "cpu", "rollout", False),
        ("DeepSeek-V3.2", "cuda", "rollout", False),
        ("DeepSeek-V3.2", "cpu", "sft", False),
        ("DeepSeek-V3", "cpu", "rollout", False),
    ],
)
def test_engines_on_a_cpu(model: str, device: str, source: str, refused: bool) -> None:
    recipe = Recipe()
    recipe.cluster.device, recipe.train.source = device, source  # type: ignore[assignment]
    errors = [error for error in sampled_errors(recipe, published.read(model)) if isinstance(error, RecipeError)]
    found = [error for error in errors if error.key == "cluster.device"]
    assert len(found) == refused and all("vLLM's CPU build has no" in str(error) for error in found)
