"""`rollout.quantization`: refusals before any process starts, the correction that it sets, and the arguments of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import load_recipe
from megarl.engines.specs import policy_spec
from megarl.engines.vllm import args, quantization
from megarl.engines.vllm.args import build_engine_args, check_engine_args, check_plan
from megarl.hf import published
from megarl.preflight.engines import check_quantization
from megarl.preflight.environment import quantization_notice
from megarl.recipe import RecipeError
from megarl.recipe.text import to_yaml
from tests.support.stack import ROOT

GRPO = ROOT / "recipes" / "cuda" / "grpo_qwen3_8b.yaml"
FP8 = "rollout.quantization=fp8"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=sglang"], "quantizes the weights of vLLM alone, and rollout.engine is sglang"),
        (["rollout.dtype=float32"], "the engines' data type is float32"),
        (["model.dtype=float32"], "the engines' data type is float32"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe(GRPO, [FP8, *overrides])
    assert caught.value.key == "rollout.quantization"


def test_other_data_types_than_float32_are_accepted() -> None:
    load_recipe(GRPO, [FP8, "model.dtype=float32", "rollout.dtype=float16"])


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_vllms_arguments_are_refused_in_favour_of_the_key(name: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.engine_args\.{name} cannot be set: set rollout\.quantization"):
        check_engine_args({name: "fp8_per_block"})
    if name == "quantization":
        check_engine_args({name: "fp8_per_block"}, "judge")


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ("Qwen3-8B", ["rollout.tensor_parallel=8"], None),
        ("Qwen3-30B-A3B", ["rollout.tensor_parallel=2"], None),
        (
            "Qwen3-30B-A3B",
            ["rollout.tensor_parallel=4"],
            r"moe_intermediate_size = 768 / 4 = 192 columns .* rollout.expert_parallel=true or rollout.tensor_parallel=2",
        ),
        ("Qwen3-30B-A3B", ["rollout.tensor_parallel=4", "rollout.expert_parallel=true"], None),
        (
            "Moonlight-16B-A3B",
            ["rollout.tensor_parallel=4", "rollout.expert_parallel=true"],
            "shared experts = 2816 / 4",
        ),
        ("GLM-4.5-Air", [], r"intermediate_size = 10944 is not a multiple of the 128"),
        (
            "Qwen2.5-7B-Instruct",
            ["rollout.tensor_parallel=8"],
            r"heads x head size = 3584 / 8 = 448 .*tensor_parallel=4",
        ),
        ("Mixtral-8x7B-v0.1", ["rollout.tensor_parallel=8"], None),
        ("DeepSeek-V3", ["rollout.tensor_parallel=8"], None),
        ("DeepSeek-V3.2", [], "not tested with sparse attention"),
        ("Qwen3-Next-80B-A3B-Instruct", [], "not tested with linear attention"),
        ("Qwen3-VL-8B-Instruct", [], "not tested with models that read images"),
        ("gpt-oss-20b", [], "not tested with gpt-oss"),
    ],
)
def test_models_must_divide_into_blocks(model: str, overrides: list[str], words: str | None) -> None:
    rollout = load_recipe(GRPO, [FP8, *overrides], check=False).rollout
    if words is None:
        check_quantization(rollout, published.read(model))
        return
    with pytest.raises(RecipeError, match=f"(?s){words}"):
        check_quantization(rollout, published.read(model))
    rollout.quantization = None
    check_quantization(rollout, published.read(model))


# --- the device and vLLM --------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "words"), [("cpu", "need AMX"), ("npu", "vllm-ascend has no FP8"), ("cuda", None)])
def test_vllm_quantizes_on_cuda(device: str, words: str | None) -> None:
    spec = policy_spec(load_recipe(GRPO, [FP8]), "engine0", updated=True)
    if words is None:
        check_plan(spec, device)
        return
    with pytest.raises(RecipeError, match=words):
        check_plan(spec, device)


def test_a_vllm_without_the_scheme_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "model_executor" / "layers" / "quantization" / "__init__.py"
    listed.parent.mkdir(parents=True)
    listed.write_text('QUANTIZATIONS = ["fp8", "online"]')
    monkeypatch.setattr(quantization, "package_folder", lambda package: tmp_path)
    with pytest.raises(RecipeError, match="this version of vLLM has no quantization fp8_per_block"):
        quantization.check("cuda")
    with pytest.raises(RecipeError, match=r"install vLLM 0\.32"):
        quantization.arguments()
    listed.write_text('QUANTIZATIONS = ["fp8", "fp8_per_block"]')
    quantization.check("cuda")


@pytest.mark.parametrize("updated", [True, False])  # False: `megarl eval` samples as training does
def test_vllm_gets_the_scheme_and_keeps_routers(updated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "_model_config", lambda path: published.read("Qwen3-30B-A3B"))
    arguments = build_engine_args(policy_spec(load_recipe(GRPO, [FP8]), "engine0", updated=updated), "cuda")
    assert arguments["quantization"] == "fp8_per_block"
    plain = build_engine_args(policy_spec(load_recipe(GRPO), "engine0", updated=updated), "cuda")
    assert "quantization" not in plain and "quantization_config" not in plain
    ignore = arguments["quantization_config"]["ignore"]
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.utils")
    for name, is_ignored in {
        "model.layers.0.mlp.gate": True,
        "model.layers.0.block_sparse_moe.gate": True,
        "model.layers.0.mlp.router": True,
        "model.layers.0.mlp.gate_up_proj": False,
        "model.layers.0.mlp.experts": False,
        "model.layers.0.self_attn.qkv_proj": False,
    }.items():
        assert utils.should_ignore_layer(name, ignore=ignore) == is_ignored, name


# --- the correction -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "weights", "notice"),
    [
        ([], "token", "corrected by algorithm.correction.weights=token, truncated at 2"),
        (["algorithm.correction.weights=sequence"], "sequence", "weights=sequence, truncated at 2"),
        (
            ["algorithm.correction.weights=none"],
            "none",
            "nothing corrects the loss: set algorithm.correction.weights=token",
        ),
        (["algorithm.correction.icepop=[0.5, 5]"], "token", "weights=token, truncated at 5"),
        (["algorithm.correction.reject.mean_k3=0.01"], "none", "by the limits of algorithm.correction.reject"),
        (["algorithm.old_log_probs=rollout"], "none", r"its ratio to the engines' log-probs"),
    ],
)
def test_quantized_engines_have_a_correction(overrides: list[str], weights: str, notice: str) -> None:
    recipe = load_recipe(GRPO, [FP8, *overrides])
    assert recipe.algorithm.correction.weights == weights
    assert notice in str(quantization_notice(recipe))


def test_other_engines_have_none() -> None:
    recipe = load_recipe(GRPO)
    assert recipe.algorithm.correction.weights == "none" and quantization_notice(recipe) is None


def test_a_resolved_recipe_keeps_the_users_choice(tmp_path: Path) -> None:
    for choice in ("none", "token"):
        recipe: Any = load_recipe(GRPO, [FP8, f"algorithm.correction.weights={choice}"])
        (tmp_path / "resolved.yaml").write_text(to_yaml(recipe))
        assert load_recipe(tmp_path / "resolved.yaml").algorithm.correction.weights == choice
