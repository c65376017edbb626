"""Tiny Hugging Face models for the Megatron tests, random but fixed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import delta_net_models, gemma3_model, gpt_oss_model, sparse_attention_models
from tests.support.megatron_prediction import add_mtp_layer

LENGTHS = [7, 13, 41, 5, 3, 15, 9, 3]
"""Of the sequences of the global batch. With [7, 13, 41] in one micro batch, attention needs two rectangles;
in pairs, they need no padding under TP 2."""

LOSS_SCALE = 1 / sum(LENGTHS)
TEMPERATURE, ENTROPY_COEF, CLIP_GRAD = 0.7, 0.05, 2.0
"""Of the training steps."""

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _qwen2() -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON))


def _qwen2_tied() -> transformers.PreTrainedModel:
    # 255 entries: no tensor-parallel size divides them, so the vocabulary is padded.
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**COMMON, "vocab_size": 255, "tie_word_embeddings": True})
    )


def _qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16))


def _qwen3_moe() -> transformers.PreTrainedModel:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, num_experts=4, mlp_only_layers=[])
    )


def _qwen3_moe_raw() -> transformers.PreTrainedModel:
    """Qwen3-MoE with routing weights from the softmax over all experts, not normalized over the chosen experts."""
    experts = {**EXPERTS, "norm_topk_prob": False}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, **experts, head_dim=16, num_experts=4, mlp_only_layers=[])
    )


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, head_dim=32))


LATENT = {
    **COMMON,
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.5,
}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}


def _deepseek_v3() -> transformers.PreTrainedModel:
    """Config with features of DeepSeek-V3: YaRN, low-rank queries, expert groups, and an MTP layer."""
    config = transformers.DeepseekV3Config(
        **LATENT, n_group=2, topk_group=1, q_lora_rank=32, rope_parameters={**_YARN}, num_nextn_predict_layers=1
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _moonlight() -> transformers.PreTrainedModel:
    """DeepSeek-V3's architecture with full-rank queries, one group and two leading dense layers."""
    config = {**LATENT, "first_k_dense_replace": 2, "n_shared_experts": 2}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**config, n_group=1, topk_group=1, q_lora_rank=None)
    )


def _glm4_moe() -> transformers.PreTrainedModel:
    """Config with features of GLM-4.5: partial rotation, biases of queries, keys and values, and an MTP layer."""
    config = transformers.Glm4MoeConfig(
        **COMMON,
        **EXPERTS,
        head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=1,
    )
    return transformers.Glm4MoeForCausalLM(config)


def _glm4_moe_plain() -> transformers.PreTrainedModel:
    """GLM-4.5's architecture without biases and norms of queries and keys, with two shared experts and another rotated part."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = transformers.Glm4MoeConfig(
        **COMMON,
        **EXPERTS,
        head_dim=32,
        n_routed_experts=8,
        n_shared_experts=2,
        attention_bias=False,
        use_qk_norm=False,
        rope_parameters=rope,
    )
    return transformers.Glm4MoeForCausalLM(config)


def _llama3() -> transformers.PreTrainedModel:
    """Llama 3.1's scaled rotary embedding, with wavelengths of all three kinds: kept, interpolated and stretched."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, rope_parameters=llama3))


def _mistral() -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, head_dim=32, sliding_window=None))


def _qwen3_yarn() -> transformers.PreTrainedModel:
    """Qwen3 with YaRN, which its authors recommend for long contexts."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16, rope_parameters=yarn))


def _qwen3_linear() -> transformers.PreTrainedModel:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16, rope_parameters=linear))


def _qwen2_moe() -> transformers.PreTrainedModel:
    """Qwen2-MoE with a gated shared expert, and a dense layer among its layers."""
    experts = {**EXPERTS, "norm_topk_prob": False}
    config = transformers.Qwen2MoeConfig(
        **COMMON, **experts, num_experts=4, shared_expert_intermediate_size=64, mlp_only_layers=[1]
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _mixtral() -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        **{**COMMON, "intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _minimax_m2() -> transformers.PreTrainedModel:
    """MiniMax-M2: norms of queries and keys over all heads, half of each head rotated, experts scored by a sigmoid."""
    config = transformers.MiniMaxM2Config(
        **{**COMMON, "intermediate_size": 32}, head_dim=32, rotary_dim=16, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MiniMaxM2ForCausalLM(config)


def _olmoe() -> transformers.PreTrainedModel:
    """OLMoE: norms of queries and keys over all heads, and routing weights that are not normalized over the chosen experts."""
    config = transformers.OlmoeConfig(
        **{**COMMON, "intermediate_size": 32},
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        # Not in `global_batch`: transformers gives the embedding of the padding token, by default 1, no gradient.
        pad_token_id=255,
    )
    return transformers.OlmoeForCausalLM(config)


ERNIE = {
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_k": 2,
    "pad_token_id": 255,  # see `_olmoe`
}


def _ernie4_5_moe() -> transformers.PreTrainedModel:
    """ERNIE-4.5-21B-A3B: tied embeddings, shared experts, experts chosen by a softmax and a bias, and an MTP layer."""
    config = transformers.Ernie4_5_MoeConfig(
        **{**COMMON, "tie_word_embeddings": True}, **ERNIE, moe_num_shared_experts=2, num_nextn_predict_layers=1
    )
    return transformers.Ernie4_5_MoeForCausalLM(config)


def _ernie4_5_moe_plain() -> transformers.PreTrainedModel:
    """ERNIE-4.5-300B-A47B: no shared experts, and more leading dense layers; a dense layer at the end, too."""
    layers = {"moe_layer_start_index": 2, "moe_layer_end_index": 2}
    config = transformers.Ernie4_5_MoeConfig(**COMMON, **ERNIE, **layers, moe_num_shared_experts=0)
    return transformers.Ernie4_5_MoeForCausalLM(config)


def _glm4_moe_lite() -> transformers.PreTrainedModel:
    """GLM-4.7-Flash: DeepSeek-V3's attention with low-rank queries, one group."""
    config = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
    return transformers.Glm4MoeLiteForCausalLM(
        transformers.Glm4MoeLiteConfig(**config, n_group=1, topk_group=1, q_lora_rank=32, rms_norm_eps=1e-6)
    )


def _kimi_k2() -> transformers.PreTrainedModel:
    """Kimi-K2: DeepSeek-V3's architecture with one group of experts. `write_model` gives it its own model_type."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    }
    config = transformers.DeepseekV3Config(**LATENT, n_group=1, topk_group=1, q_lora_rank=32, rope_parameters=yarn)
    config.num_nextn_predict_layers = 0
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_tied": _qwen2_tied,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_raw": _qwen3_moe_raw,
    "deepseek_v3": _deepseek_v3,
    "moonlight": _moonlight,
    "glm4_moe": _glm4_moe,
    "glm4_moe_plain": _glm4_moe_plain,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_yarn": _qwen3_yarn,
    "qwen3_linear": _qwen3_linear,
    "qwen2_moe": _qwen2_moe,
    "mixtral": _mixtral,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "ernie4_5_moe": _ernie4_5_moe,
    "ernie4_5_moe_plain": _ernie4_5_moe_plain,
    "gpt_oss": partial(gpt_oss_model.build, COMMON),
    "glm4_moe_lite": _glm4_moe_lite,
    "kimi_k2": _kimi_k2,
    "qwen3_next": partial(delta_net_models.qwen3_next, COMMON, EXPERTS),
    "qwen3_5_text": partial(delta_net_models.qwen3_5_text, COMMON),
    "qwen3_5": partial(delta_net_models.qwen3_5, COMMON),
    "qwen3_5_moe": partial(delta_net_models.qwen3_5_moe, COMMON, EXPERTS),
    "qwen3_5_moe_text": partial(delta_net_models.qwen3_5_moe_text, COMMON, EXPERTS),
    "deepseek_v32": partial(sparse_attention_models.deepseek_v32, LATENT, _YARN),
    "glm_moe_dsa": partial(sparse_attention_models.glm_moe_dsa, LATENT),
    "gemma3_text": partial(gemma3_model.text, COMMON),
    "gemma3": partial(gemma3_model.with_tower, COMMON),
}


def write_model(name: str, directory: Path) -> Path:
    """Save the model `name` under `directory`/`name`; its weights are the same every time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.05)
        if name == "gpt_oss":
            gpt_oss_model.exceed_the_limit(model)
        for key, value in [*model.named_buffers(), *model.named_parameters()]:
            if "e_score" in key:  # larger ones would leave some experts without a token
                value.copy_(torch.randn_like(value) * 0.01)
    path = directory / name
    model.save_pretrained(path)
    if name == "kimi_k2":
        _name_kimi(path / "config.json")
    if name in ("qwen3_5_moe", "qwen3_5_moe_text"):
        save_file(stack_experts(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    if json.loads((path / "config.json").read_text()).get("num_nextn_predict_layers"):
        add_mtp_layer(path / "model.safetensors", model.config.num_hidden_layers, ernie=name.startswith("ernie"))
    return path


def _name_kimi(file: Path) -> None:
    """Write the model_type of Kimi-K2, which transformers does not know: its repository brings the model's code."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_type": "kimi_k2"}))


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as Qwen3.5 is published: two tensors per layer hold all its experts."""
    stacked = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d", name)}
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        prefix = name.partition(".experts.0.")[0]
        of_experts = range(sum(f"{prefix}.experts.{number}.gate_proj.weight" in tensors for number in range(64)))
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{number}.{part}_proj.weight"] for number in of_experts])
            for part in ("gate", "up", "down")
        )
        stacked[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        stacked[f"{prefix}.experts.down_proj"] = down
    return stacked


def reference_model(directory: Path) -> Any:
    """Load a directory of `write_model` with transformers, in float32 and with its plain implementations."""
    fields = json.loads((directory / "config.json").read_text())
    if fields["model_type"] == "kimi_k2":
        fields["model_type"] = "deepseek_v3"
    with_tower = "vision_config" in fields
    read = transformers.AutoModelForImageTextToText if with_tower else transformers.AutoModelForCausalLM
    return read.from_pretrained(
        directory,
        config=transformers.AutoConfig.for_model(**fields),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def global_batch() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens and advantages [length] of each sequence."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]
    return tokens, [torch.randn(length, generator=generator) for length in LENGTHS]


def rows_of_logits(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropy, sums of squared probabilities) of `tokens` [length] under `logits` [length, vocabulary]; 0 for the
    first token, which is predicted by nothing."""
    scores = logits[:-1].log_softmax(-1)
    log_probs = scores.gather(1, tokens[1:, None]).squeeze(1)
    entropy = -(scores.exp() * scores).sum(-1)
    squares = scores.exp().square().sum(-1)
    return (
        torch.cat([torch.zeros(1), log_probs]),
        torch.cat([torch.zeros(1), entropy]),
        torch.cat([torch.zeros(1), squares]),
    )
