"""Rehearsals of recipes with quantized engines."""

from __future__ import annotations

from pathlib import Path

from megarl.commands.rehearse.tiny_copy import make_tiny_copy


def test_a_tiny_copy_has_no_quantized_engines(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "cuda" / "grpo_qwen3_8b.yaml"
    tiny = make_tiny_copy(recipe, ["rollout.quantization=fp8"], tmp_path)
    assert tiny.recipe.rollout.quantization is None
    assert tiny.recipe.algorithm.correction.weights == "token"
    (change,) = [change for change in tiny.changes if change.key == "rollout.quantization"]
    assert change.outcome == "left out" and "GPUs" in str(change)
