"""Models and settings that the trainer refuses, and facts of config.json that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.errors import RecipeError
from megarl.hf.config import layer_kinds, number_of_experts, text_fields
from megarl.hf.families import FAMILIES
from megarl.hf.families.check import check_model
from megarl.hf.families.settings import rotary_of_kind
from megarl.hf.published import read as published
from megarl.megatron.extra_settings import check_extra
from megarl.recipe.schema import Recipe
from tests.megatron.test_units import DENSE, LATENT, SPARSE, VISION
from tests.support.megatron_models import MODELS
from tests.support.vl_model import VL_MODELS

GPT_OSS = {
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "swiglu_limit": 7.0,
}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512, "rope_scaling": None}
SPARSE_ATTENTION = {
    "model_type": "glm_moe_dsa",
    "num_experts_per_tok": 8,
    "q_lora_rank": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
ERNIE = {"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6}
GLM = {"model_type": "glm4_moe", "attention_bias": True, "num_experts_per_tok": 8}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"model_type": "gpt_neox"},
            "'gpt_neox' model. megarl trains deepseek_v3, deepseek_v32, .*docs/add_a_model.md",
        ),
        ({"model_type": "gemma3n", "vision_config": {}}, "'gemma3n' model"),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            "fp8.*Take the unquantized model, or convert it to bfloat16",
        ),
        (
            {"model_type": "llama", "compression_config": {"format": "pack"}},
            "compression_config.*Take the unquantized model",
        ),
        ({**VISION, "text_config": {**DENSE, "quantization_config": {"quant_method": "awq"}}}, "awq"),
        *(({"model_type": kind, "hidden_act": "gelu"}, "hidden_act: gelu") for kind in ("llama", "qwen2", "qwen3_moe")),
        *(({"model_type": kind, "use_sliding_window": True}, "sliding") for kind in ("qwen2", "qwen3", "qwen3_moe")),
        ({**VISION, "text_config": {**DENSE, "use_sliding_window": True}}, "sliding"),
        *(({"model_type": kind, "attention_bias": True}, "attention_bias") for kind in ("llama", "qwen3", "qwen3_moe")),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "attention_dropout": 0.1}, "attention_dropout"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ({**GLM, "num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ({**GLM, "norm_topk_prob": False}, "norm_topk_prob"),
        ({**GLM, "n_group": 2}, "n_group"),
        ({**GLM, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({**GLM, "rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rotary scaling 'yarn'"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "dynamic", "factor": 4}}, "rotary scaling 'dynamic'"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}}, "rotary scaling 'longrope'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: 4096"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ({"model_type": "minimax_m2", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({**ERNIE, "use_bias": True}, "use_bias: true"),
        ({**ERNIE, "moe_norm_min": 1e-3}, "moe_norm_min: 0.001, which vLLM"),
        ({**ERNIE, "moe_gate_act": "sigmoid"}, "moe_gate_act: sigmoid"),
        ({**ERNIE, "moe_use_aux_free": False}, "moe_use_aux_free: false"),
        ({**ERNIE, "rope_parameters": {"rope_type": "linear", "factor": 4}}, "rotary scaling 'linear'"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv: 8.0"),
        ({"model_type": "olmoe", "attention_bias": True}, "attention_bias"),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "norm_topk_prob: true"),
        ({"model_type": "olmoe", "rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06"),
        ({**GPT_OSS, "num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias: false"),
        ({**GPT_OSS, "sliding_window": None}, "sliding_window: None"),
        ({**GPT_OSS, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        ({**GPT_OSS, "layer_types": ["sliding_attention"] * 2}, "layer_types other than"),
        ({**GPT_OSS, "swiglu_alpha": 1.5}, "swiglu_alpha: 1.5, where engines have 1.702"),
        ({**GPT_OSS, "swiglu_limit": 10.0}, "swiglu_limit: 10.0"),
        ({**GPT_OSS, "rope_scaling": None}, "rotary scaling 'default'"),
        ({**GPT_OSS, "rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor, which engines do not read"),
        ({**GPT_OSS, "rope_scaling": {**YARN, "mscale": 1.0}}, "mscale, which engines do not read"),
        ({**GPT_OSS, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4.*megarl convert-weights"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation: gelu"),
        ({**GEMMA, "sliding_window": None}, "sliding_window: None"),
        ({**GEMMA, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types: chunked_attention"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "attention_bias": True}, "attention_bias"),
        ({**GEMMA, "rope_scaling": {**YARN}}, "rotary scaling 'yarn'"),
        (
            {**GEMMA, "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
            "rotary scaling 'linear' in layers with a sliding window",
        ),
        ({**SPARSE_ATTENTION, "q_lora_rank": None}, "q_lora_rank: null"),
        ({**SPARSE_ATTENTION, "index_topk": None}, "index_topk: None"),
        ({**SPARSE_ATTENTION, "indexer_rope_interleave": False}, "indexer_rope_interleave: false"),
        ({**SPARSE_ATTENTION, "index_topk_freq": 4}, "share the indexer of an earlier layer"),
        ({**SPARSE_ATTENTION, "index_topk_pattern": "FSSF"}, "share the indexer of an earlier layer"),
        ({**SPARSE_ATTENTION, "indexer_types": ["full", "shared"]}, "share the indexer of an earlier layer"),
        ({**LATENT, "rope_parameters": {"rope_type": "linear"}}, "rotary scaling 'linear'"),
        ({**LATENT, "norm_topk_prob": False}, "norm_topk_prob"),
        ({**LATENT, "num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ({**LATENT, "n_shared_experts": 0}, "no shared experts"),
        ({**LATENT, "attention_bias": True}, "attention_bias"),
        ({**LATENT, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({**LATENT, "quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({**LATENT, "num_experts_per_tok": 8}, "8 / 2 = 4"),
        ({**LATENT, "rope_interleave": False}, "rope_interleave"),
        ({**LATENT, "rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor"),
        ({**LATENT, "rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ({**LATENT, "rope_parameters": {**YARN, "mscale": 1.0}}, "only one of mscale"),
    ],
)
def test_unsupported_models_are_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_model(model)


def test_supported_models_are_accepted() -> None:
    for rotary in ({"rope_scaling": None}, {"rope_scaling": {**YARN, "type": "yarn"}}, {"rope_parameters": YARN}):
        check_model({**LATENT, **rotary})
    check_model({**LATENT, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6})
    check_model({"model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 1})
    check_model({"model_type": "qwen2", "attention_bias": True, "use_sliding_window": False, "sliding_window": 4096})
    check_model({"model_type": "llama", "tie_word_embeddings": True, "hidden_act": "silu"})
    check_model({**GLM, "n_group": 1, "use_qk_norm": True, "quantization_config": None, "partial_rotary_factor": 0.5})
    check_model({**VISION, "text_config": {**DENSE, "model_type": "qwen2_5_vl_text"}})
    check_model(GPT_OSS)
    check_model({name: value for name, value in GPT_OSS.items() if name in ("model_type", "rope_scaling")})


def test_every_supported_model_is_compared_with_transformers() -> None:
    """The layout tests compare every trained model family with transformers."""
    tried = {MODELS[name]().config.model_type for name in MODELS}
    with_images = {make().model_type for make in VL_MODELS.values()}
    assert {*tried, *with_images, "kimi_k2"} == set(FAMILIES)


def test_text_config_fields_override_sizes_but_not_the_type() -> None:
    text = {"hidden_size": 64, "model_type": "text", "tie_word_embeddings": True, "num_local_experts": 4}
    whole = {"hidden_size": 32, "model_type": "whole", "tie_word_embeddings": False, "vision_config": {}}
    merged = text_fields({**whole, "text_config": text})
    assert {name: merged[name] for name in whole} == {**whole, "hidden_size": 64}
    assert number_of_experts(merged) == 4 and number_of_experts(whole) == 0
    assert text_fields(whole) == whole and text_fields({**whole, "text_config": None})["hidden_size"] == 32


def test_fp8_with_block_scales_is_refused_with_the_convert_command() -> None:
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ValueError, match=r"quantized.*megarl convert-weights"):
        check_model(published("DeepSeek-V3") | blocks)
    with pytest.raises(ValueError, match=r"quantized.*awq.*Take the unquantized model"):
        check_model(published("DeepSeek-V3") | {"quantization_config": {"quant_method": "awq"}})


def test_sinks_are_refused_where_transformer_engine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native layers have them: on a CPU, and on GPUs without Transformer Engine."""
    model = {**SPARSE, **GPT_OSS}
    recipe = Recipe()
    recipe.cluster.device = "cpu"
    check_extra(recipe, model, "megatron")
    recipe.cluster.device = "cuda"
    check_extra(recipe, SPARSE, "megatron")
    with pytest.raises(RecipeError, match=r"megatron\.packing = true[\s\S]*sinks for packed sequences[\s\S]*false"):
        check_extra(recipe, model, "megatron")
    recipe.megatron.packing = False
    check_extra(recipe, model, "megatron")
    recipe.megatron.extra = {"attention_backend": "flash"}
    with pytest.raises(RecipeError, match=r"critic\.megatron\.extra\.attention_backend[\s\S]*flash attention"):
        check_extra(recipe, model, "critic.megatron")
    recipe.megatron.extra, recipe.megatron.context_parallel = {}, 2
    with pytest.raises(RecipeError, match=r"megatron\.context_parallel = 2[\s\S]*context-parallel ranks"):
        check_extra(recipe, model, "megatron")
    monkeypatch.setattr("megarl.platform.transformer_engine.is_importable", lambda: False)
    monkeypatch.setattr("megarl.platform.device_kind.DeviceKind.is_here", lambda _: True)
    recipe.megatron.packing = True
    check_extra(recipe, model, "megatron")


@pytest.mark.parametrize("here", [False, True])
def test_sinks_are_refused_on_npus(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with NPUs, where only trainers have MindSpeed's stand-in of Transformer Engine."""
    monkeypatch.setattr("megarl.platform.device_kind.DeviceKind.is_here", lambda _: here)
    recipe = Recipe()
    recipe.cluster.device = "npu"
    for section, key in (("megatron", r"model\.path"), ("critic.megatron", r"critic\.model_path")):
        with pytest.raises(RecipeError, match=rf"{key} = [\s\S]*sinks and sliding windows[\s\S]*cluster\.device: cuda"):
            check_extra(recipe, {**SPARSE, **GPT_OSS}, section)


def test_windows_over_context_parallel_ranks_are_refused_where_transformer_engine_has_none() -> None:
    model, recipe = published("gemma-3-27b-it"), Recipe()
    recipe.cluster.device = "cuda"
    check_extra(recipe, model, "megatron")
    recipe.megatron.context_parallel = 2
    check_extra(recipe, DENSE, "megatron")
    with pytest.raises(RecipeError, match=r"megatron\.context_parallel = 2[\s\S]*no sliding windows over[\s\S]*to 1"):
        check_extra(recipe, model, "megatron")
    recipe.cluster.device = "cpu"
    check_extra(recipe, model, "megatron")


def test_published_configurations_may_leave_out_defaults() -> None:
    """Gemma 3 27B's config.json has no vocabulary size, context length, rotary base or pattern of layers."""
    whole = published("gemma-3-27b-it")
    text = text_fields(whole)
    assert (text["vocab_size"], text["tie_word_embeddings"], text["num_attention_heads"]) == (262_208, True, 32)
    kinds = layer_kinds(text)
    assert len(kinds) == 62 and [place for place, kind in enumerate(kinds) if kind == "full_attention"] == [
        *range(5, 62, 6)
    ]
    settings = FAMILIES["gemma3"].settings(text)
    assert settings["softmax_scale"] == 168**-0.5 and settings["window_size"] == (1023, 0)
    assert settings["window_attn_skip_freq"] == [int(kind == "sliding_attention") for kind in kinds]
    expected = {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    expected["full_attention"] = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    for kind, rotary in expected.items():
        assert rotary_of_kind(text, kind) == rotary
        assert rotary_of_kind({"rope_parameters": expected}, kind) == rotary
