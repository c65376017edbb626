"""Rehearsals of recipes whose engines have features of accelerators: quantization, graphs, large delta nets."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from megarl.commands.data.tiny_weights import write_weights
from megarl.commands.rehearse.changes import Changes
from megarl.commands.rehearse.model import shrink_model
from megarl.commands.rehearse.tiny_copy import make_tiny_copy
from megarl.hf import published
from megarl.hf.config import text_fields
from megarl.hf.families import FAMILIES

RECIPES = Path(__file__).parents[3] / "recipes"


def test_a_tiny_copy_has_no_quantized_engines(tmp_path: Path) -> None:
    recipe = RECIPES / "cuda" / "grpo_qwen3_8b.yaml"
    tiny = make_tiny_copy(recipe, ["rollout.quantization=fp8"], tmp_path)
    assert tiny.recipe.rollout.quantization is None
    assert tiny.recipe.algorithm.correction.weights == "token"
    (change,) = [change for change in tiny.changes if change.key == "rollout.quantization"]
    assert change.outcome == "left out" and "GPUs" in str(change)


@pytest.mark.parametrize(("override", "kept"), [("false", None), ("true", True)])
def test_a_tiny_copy_has_no_graphs(override: str, kept: bool | None, tmp_path: Path) -> None:
    """vLLM on a CPU does not start with enforce_eager=false: it compiles for graphs."""
    recipe = RECIPES / "grpo_qwen3_8b.yaml"
    tiny = make_tiny_copy(recipe, [f"rollout.engine_args.enforce_eager={override}"], tmp_path)
    assert tiny.recipe.rollout.engine_args.get("enforce_eager") is kept
    (change,) = [change for change in tiny.changes if change.key == "rollout.engine_args.enforce_eager"]
    assert change.outcome == ("kept" if kept else "left out")


@pytest.mark.parametrize("name", published.names())
def test_an_engine_on_a_cpu_has_kernels_of_the_sizes(name: str) -> None:
    """vLLM's delta nets have heads of 64 or 128 elements. A tower that is not trained is left out, since it would stay large."""
    config = published.read(name)
    small = shrink_model(config, 2, Changes())
    heads = {text_fields(small).get(f"linear_{part}_head_dim", 64) for part in ("key", "value")}
    assert heads <= {64, 128}
    assert not {"vision_config", "image_token_id"} & small.keys() or FAMILIES[config["model_type"]].tower


@pytest.mark.parametrize(
    ("model", "means"), [("Qwen3-8B", {1}), ("gemma-3-1b-it", {0}), ("Qwen3-Next-80B-A3B-Instruct", {0, 1})]
)
def test_norms_scale_by_about_one(model: str, means: set[int], tmp_path: Path) -> None:
    """Qwen3-Next and Gemma 3 add 1 to the weights of their norms, except Qwen3-Next's in delta nets."""
    file = tmp_path / "model.safetensors"
    write_weights(file, shrink_model(published.read(model), 2, Changes()), 0, 0.1)
    norms = {name: round(float(value.mean())) for name, value in load_file(file).items() if "norm" in name}
    assert set(norms.values()) == means
    in_delta_nets = {mean for name, mean in norms.items() if name.endswith("linear_attn.norm.weight")}
    assert in_delta_nets <= {1} and len(norms) > 2
