"""The linears that a recipe's `lora` section selects, and the targets rejected before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.errors import RecipeError
from megarl.hf.linears import linears_of, linears_of_layer, matches
from megarl.megatron.layout import layers_of_chunks
from megarl.megatron.lora.targets import check_lora
from megarl.preflight.load import load_recipe
from megarl.recipe.trainers import LoraConfig, MegatronConfig

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DENSE = {"model_type": "qwen3", **SIZES}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, **SIZES, **EXPERTS}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SIZES,
    **EXPERTS,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def chosen(config: dict[str, Any], *targets: str) -> list[str]:
    lora = LoraConfig(rank=8, targets=list(targets))
    check_lora(config, lora, MegatronConfig())
    return [name for name in linears_of(config) if matches(name, lora.targets)]


def test_a_short_name_matches_all_layers_and_a_longer_one_fewer() -> None:
    assert chosen(MIXTURE, "q_proj", "o_proj") == ["self_attn.q_proj", "self_attn.o_proj"]
    everywhere = chosen(DEEPSEEK, "gate_proj", "up_proj", "down_proj")
    assert [name for name in everywhere if name.endswith("up_proj")] == [
        "mlp.experts.up_proj",
        "mlp.shared_experts.up_proj",
        "mlp.up_proj",
    ]
    assert chosen(DEEPSEEK, "shared_experts.up_proj", "mlp.down_proj") == [
        "mlp.shared_experts.up_proj",
        "mlp.down_proj",
    ]
    assert len(chosen(DEEPSEEK, "all-linear")) == 5 + 9
    assert matches("model.layers.3.mlp.experts.17.up_proj", ["experts.up_proj"])
    assert not matches("model.layers.3.mlp.experts.17.up_proj", ["mlp.up_proj", "shared_experts.up_proj", "proj"])


@pytest.mark.parametrize(
    ("config", "targets", "message"),
    [
        (DENSE, ["q_porj"], "no linear 'q_porj'. Did you mean q_proj?"),
        (DENSE, ["all_linear"], "Did you mean all-linear?"),
        (DEEPSEEK, ["shared_expert.up_proj"], "Did you mean shared_experts.up_proj?"),
        (DEEPSEEK, ["q_proj"], "no linear 'q_proj'"),
        (MIXTURE, ["lm_head"], "no linear 'lm_head'"),
        (MIXTURE, ["up_proj", "down_proj"], "without their gate_proj"),
        ({"model_type": "mixtral"}, ["q_proj"], "this model is 'mixtral'"),
    ],
)
def test_targets_that_the_model_lacks_are_refused(config: dict[str, Any], targets: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        chosen(config, *targets)
    assert message in str(error.value)
    check_lora(config, LoraConfig(rank=0), MegatronConfig())


def test_a_pipeline_stage_without_targets_is_refused() -> None:
    """Without the check, only that stage's process would fail, while the other processes wait for it."""
    lora = LoraConfig(rank=8, targets=["mlp.down_proj"])  # only in the leading dense layer
    check_lora(DEEPSEEK, lora, MegatronConfig())
    for megatron, layers in (
        (MegatronConfig(pipeline_parallel=2), "layers 2 to 3"),
        (MegatronConfig(pipeline_parallel=2, first_stage_layers=3), "layers 3 to 3"),
        (MegatronConfig(pipeline_parallel=2, virtual_pipeline=2), "layers 1 to 1"),
    ):
        with pytest.raises(RecipeError, match=layers):
            check_lora(DEEPSEEK, lora, megatron)
    experts = LoraConfig(rank=8, targets=["experts.gate_proj", "experts.up_proj", "experts.down_proj"])
    check_lora(DEEPSEEK, experts, MegatronConfig(pipeline_parallel=2))
    with pytest.raises(RecipeError, match="layers 0 to 0"):
        check_lora(DEEPSEEK, experts, MegatronConfig(pipeline_parallel=4))


def test_layers_of_each_chunk() -> None:
    uneven = MegatronConfig(pipeline_parallel=3, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=4)
    assert [list(chunk) for chunk in layers_of_chunks(10, uneven)] == [[0], [1, 2], [3, 4], [5], [6, 7], [8, 9]]
    assert [list(chunk) for chunk in layers_of_chunks(4, MegatronConfig())] == [[0, 1, 2, 3]]


def test_dense_layers_of_any_pattern_have_no_experts() -> None:
    some_dense = {**MIXTURE, "mlp_only_layers": [0]}
    by_type = {**DEEPSEEK, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", *["sparse"] * 3]}
    del by_type["first_k_dense_replace"]
    for config in (some_dense, by_type):
        assert "mlp.up_proj" in linears_of_layer(config, 0) and "mlp.experts.up_proj" in linears_of_layer(config, 1)
        assert not any(".experts." in name for name in linears_of_layer(config, 0))


@pytest.mark.parametrize("setting", ["lora.alpha=8", "lora.targets=[q_proj]"])
def test_lora_settings_without_effect_are_refused(tmp_path: Path, setting: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: model}\n")
    with pytest.raises(RecipeError, match="rank 0 makes no adapters"):
        load_recipe(recipe, [setting])
    assert load_recipe(recipe, [setting, "lora.rank=4"]).lora.rank == 4
    with pytest.raises(RecipeError, match="no linear would have an adapter"):
        load_recipe(recipe, ["lora.rank=4", "lora.targets=[]"])
