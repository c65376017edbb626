"""DeepSeek-V3 and R1, Moonlight and Kimi-K2: latent attention, experts scored by a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.hf.families.family import Family, Refusals, after_the_first
from megarl.hf.families.rows import DENSE, EXPERTS, LATENT_ATTENTION, MODEL, ROUTING_BIAS, shared_experts
from megarl.hf.families.settings import latent_attention, mixture, rotary_scaling, sigmoid_routing
from megarl.hf.families.slices import Config


def _settings(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        **sigmoid_routing(config),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
        "moe_shared_expert_overlap": True,
        "qk_layernorm": True,
        **latent_attention(config),
    }


def _unsupported(config: Config) -> Refusals:
    """Refuse what Megatron's latent attention and routing cannot do.

    `rms_norm_eps` other than 1e-6 is supported: transformers ignores it in the norms of the latents, but engines and
    Megatron apply it there.
    """
    scaling = rotary_scaling(config)
    chosen, groups = config.get("num_experts_per_tok", 8), config.get("topk_group") or 1
    yield chosen == 1, "num_experts_per_tok: 1"
    yield not config.get("norm_topk_prob", True), "norm_topk_prob: false"
    yield config.get("scoring_func", "sigmoid") != "sigmoid", f"scoring_func: {config.get('scoring_func')}"
    yield config.get("topk_method", "noaux_tc") != "noaux_tc", f"topk_method: {config.get('topk_method')}"
    yield config.get("moe_layer_freq", 1) != 1, f"moe_layer_freq: {config.get('moe_layer_freq')}"
    yield not config.get("n_shared_experts", 1), "no shared experts (n_shared_experts)"
    yield (
        (config.get("n_group") or 1) > 1 and chosen // groups != 2,
        "groups of experts chosen by the best two scores in each, where Megatron takes the best "
        f"num_experts_per_tok / topk_group = {chosen} / {groups} = {chosen / groups:g}",
    )
    yield not config.get("rope_interleave", True), "rope_interleave: false"
    yield scaling.get("attention_factor") is not None, "a rotary attention_factor"
    yield not scaling.get("truncate", True), "rotary scaling with truncate: false"
    yield bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")), "only one of mscale and mscale_all_dim"


DEEPSEEK_V3 = Family(
    (*MODEL, *LATENT_ATTENTION, *DENSE, *EXPERTS, *shared_experts("shared_experts"), *ROUTING_BIAS),
    _settings,
    sparse=after_the_first,
    unsupported=_unsupported,
    rotary=("default", "yarn"),
    ties=False,
    latent=True,
    adapters=True,
)


KIMI_K2 = replace(DEEPSEEK_V3, reads_as="deepseek_v3")
