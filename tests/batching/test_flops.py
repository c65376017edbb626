"""Model FLOPs equal torch's count of transformers' models; peaks and MFU follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megarl.batching.flops import FORWARD_BACKWARD, ModelFlops, model_flops
from megarl.hf import published
from megarl.hf.families import FAMILIES
from megarl.hf.shape import model_shape
from megarl.platform.device_table import peak_flops
from megarl.trainer.step_metrics import speed
from tests.support.megatron_models import COMMON, EXPERTS, MODELS

LENGTHS = [5, 24]
SPARSE = {**EXPERTS, "head_dim": 16}
DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}

INDEXER = {"q_lora_rank": 40, "num_key_value_heads": 4, "index_n_heads": 3, "index_head_dim": 20, "index_topk": 512}
INTERLEAVED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [0],
    },
}

# Name: (class of the model, class of the configuration, sizes added to COMMON)
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SPARSE, "num_experts": 4, "mlp_only_layers": [1]},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**SPARSE, **DENSE_FIRST}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**EXPERTS, **DENSE_FIRST, **LATENT, "q_lora_rank": 40, "num_key_value_heads": 4},
    ),
    "deepseek_v3 without a query latent": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**EXPERTS, **DENSE_FIRST, **LATENT, "q_lora_rank": None, "num_key_value_heads": 4},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 32}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"head_dim": 32, "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**EXPERTS, **DENSE_FIRST, **LATENT, "q_lora_rank": 40, "num_key_value_heads": 4},
    ),
    **{
        kind: (f"{name}ForCausalLM", f"{name}Config", {**EXPERTS, **DENSE_FIRST, **LATENT, **INDEXER})
        for kind, name in (("deepseek_v32", "DeepseekV32"), ("glm_moe_dsa", "GlmMoeDsa"))
    },
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        },
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", {**INTERLEAVED, "head_dim": 32}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {**INTERLEAVED, **SPARSE, "num_experts": 4, "decoder_sparse_step": 2},
    ),
}


MORE = [name for name in MODELS if name not in CASES and not name.startswith(("qwen3_next", "qwen3_5"))]
"""Tiny models of the layout tests, without gated delta nets, of which only the projections are counted."""


def build(name: str) -> torch.nn.Module:
    if name in MORE:
        return tiny(MODELS[name]())
    model_class, config_class, sizes = CASES[name]
    settings = {**COMMON, "num_hidden_layers": 3, **sizes}
    vision = {"vision_config": settings.pop("vision_config")} if "vision_config" in settings else {}
    if vision:
        settings = {"text_config": settings, "tie_word_embeddings": False, **vision}
    config = getattr(transformers, config_class)(**settings)
    return tiny(getattr(transformers, model_class)(config))


def tiny(model: torch.nn.Module) -> torch.nn.Module:
    model.config._attn_implementation = "eager"  # two matrix products over the full square, which torch counts
    model.config._experts_implementation = "eager"
    return model


def full_square(flops: ModelFlops, length: int) -> float:
    """Return the FLOPs of an attention that also computes masked pairs: all length^2 pairs."""
    return flops.per_token * length + (flops.per_pair + flops.indexer_per_pair) * length**2


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_flops_equal_torchs_counter(name: str) -> None:
    """Forward, and forward with backward, to the last FLOP, attention counted over its full square."""
    model = build(name)
    flops = model_flops(model.config.to_dict())
    for length in LENGTHS:
        with FlopCounterMode(display=False) as counter:
            logits = model(input_ids=torch.arange(length)[None], use_cache=False).logits
            forward = counter.get_total_flops()
            logits.sum().backward()
        assert [forward] == [full_square(flops, length)]
        indexers = flops.indexer_per_token * length + flops.indexer_per_pair * length**2  # without gradients
        assert counter.get_total_flops() == FORWARD_BACKWARD * forward - 2 * indexers


def test_every_counted_model_is_checked() -> None:
    """Kimi-K2 has the sizes of DeepSeek-V3. Of delta nets (Qwen3-Next, Qwen3.5), only the projections are counted."""
    with_delta_nets = {kind for kind, family in FAMILIES.items() if family.delta_nets}
    assert {name.split()[0] for name in CASES} | {*MORE, "kimi_k2"} & FAMILIES.keys() | with_delta_nets == set(FAMILIES)


def test_causal_attention_needs_each_pair_once() -> None:
    flops = ModelFlops(per_token=5, per_pair=2)
    pairs = [(query, key) for query in range(7) for key in range(7) if key <= query]
    assert flops.of([7]).tolist() == [5 * 7 + 2 * len(pairs)]
    assert flops.of([1]).tolist() == [full_square(flops, 1)]
    assert flops.of_update([7]).tolist() == [3 * flops.of([7])[0]]
    assert flops.of_update([7], frozen=True).tolist() == [2 * 5 * 7 + 3 * 2 * len(pairs)]
    assert np.allclose(flops.of([40_000]), full_square(flops, 40_000) / 2, rtol=1e-4)  # far past the linear part


def test_a_window_leaves_out_the_pairs_beyond_it() -> None:
    """One of two layers has a window of 3 keys."""
    flops = ModelFlops(per_token=0, per_pair=2, window=3, windowed=0.5)
    pairs = [(query, key) for query in range(7) for key in range(7) if key <= query]
    within = [(query, key) for query, key in pairs if query - key < 3]
    assert flops.of([7]).tolist() == [len(pairs) + len(within)]
    assert flops.of([2]).tolist() == [2 * 3], "shorter than the window"


def test_windows_of_gpt_oss() -> None:
    """Three of five layers have a window of 128 keys."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 99}
    model = {"model_type": "gpt_oss", "num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2, **sizes}
    flops, attention = model_flops(model), model_shape(model).attention
    assert (flops.window, flops.windowed) == (128, 0.6) == (attention.window, attention.windowed)
    assert attention.seen(1000) == pytest.approx(0.6 * 128 + 0.4 * 1000) and attention.seen(100) == 100
    assert model_flops({**model, "model_type": "mixtral"}).windowed == 0


def test_windows_of_gemma_3() -> None:
    """All but every sixth of the 26 layers of the published model with a billion parameters have a window of 512 keys."""
    config = published.read("gemma-3-1b-it")
    flops, attention = model_flops(config), model_shape(config).attention
    assert (flops.window, flops.windowed) == (512, 22 / 26) == (attention.window, attention.windowed)


def test_selected_keys_of_sparse_attention() -> None:
    """Queries see up to 2,048 keys; the indexer scores all, and has no backward pass."""
    flops = model_flops(published.read("DeepSeek-V3.2"))
    dense = model_flops(published.read("DeepSeek-V3"))
    assert (flops.window, flops.windowed, flops.per_pair) == (2048, 1.0, dense.per_pair)
    assert flops.indexer_per_pair == 2 * 61 * 64 * 129
    assert (
        flops.per_token - dense.per_token == flops.indexer_per_token == 2 * 61 * (64 * 128 * 1536 + (128 + 64) * 7168)
    )
    short, long = 2048, 2148
    pairs = long * (long + 1) / 2
    assert (
        flops.of([short])[0]
        == dense.of([short])[0] + flops.indexer_per_token * short + flops.indexer_per_pair * short * (short + 1) / 2
    )
    indexers = flops.indexer_per_token * long + flops.indexer_per_pair * pairs
    assert flops.of([long])[0] == dense.of([long])[0] - dense.per_pair * 100 * 101 / 2 + indexers
    assert flops.of_update([long])[0] == 3 * flops.of([long])[0] - 2 * indexers


def test_flops_of_published_models() -> None:
    """Half of the linear part is the parameters that a token meets: 6.5 G of Qwen2.5-7B's 7.6 G (its input embedding
    is a look-up), 37 G of DeepSeek-V3's 671 G."""
    qwen = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    qwen |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    assert model_flops(qwen).per_token / 2 == pytest.approx(7.07e9, rel=0.001)
    deepseek = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    deepseek |= {"num_attention_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048}
    deepseek |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
    deepseek |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert model_flops(deepseek | {"v_head_dim": 128}).per_token / 2 == pytest.approx(36.6e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("gpt-oss-20b", 20.9e9, 3.6e9), ("gpt-oss-120b", 116.8e9, 5.1e9)]
)
def test_parameters_of_gpt_oss_are_those_of_its_model_card(name: str, total: float, active: float) -> None:
    shape = model_shape(published.read(name))
    assert shape.total == pytest.approx(total, rel=0.002) and shape.active == pytest.approx(active, rel=0.01)


def test_an_unsupported_model_type_is_refused() -> None:
    with pytest.raises(ValueError, match="'mamba' model"):
        model_flops({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("Ascend910B1", 363.7),
        ("Ascend910B2", 353.9),
        ("Ascend910B3", 294.9),
        ("Ascend910B4-1", 245.8),
        ("Ascend910_9392", 353.9),
        ("Ascend910_9382", 353.9),
        ("Ascend910_9362", 294.9),
        ("Ascend910B2C", 353.9),
    ],
)
def test_peaks(device: str, tflops: float) -> None:
    assert peak_flops(device) == pytest.approx(tflops * 1e12, rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA RTX A1000", "Ascend910B9", "NVIDIA H2000"])
def test_an_unknown_device_has_no_peak_and_no_mfu(device: str) -> None:
    assert peak_flops(device) is None
    assert speed("actor", 2e12, peak_flops(device)) == {"perf/tflops_per_device/actor": 2.0}


def test_mfu() -> None:
    assert speed("actor", 2e12, 8e12) == {"perf/tflops_per_device/actor": 2.0, "perf/mfu/actor": 0.25}
