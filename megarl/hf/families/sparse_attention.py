"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's architecture with attention to the keys that an indexer selects. The indexer is frozen."""

from __future__ import annotations

from dataclasses import replace

from megarl.hf.families.deepseek_v3 import DEEPSEEK_V3
from megarl.hf.families.family import Refusals
from megarl.hf.families.rows import in_layers, row
from megarl.hf.families.slices import Config, copy

_INDEXER = in_layers(
    *(row(copy, f"self_attention.indexer.{name}", f"self_attn.indexer.{name}.weight") for name in ("wq_b", "wk")),
    *(
        row(copy, f"self_attention.indexer.k_norm_{name}", f"self_attn.indexer.k_norm.{name}")
        for name in ("weight", "bias")
    ),
    row(copy, "self_attention.indexer.weights_proj", "self_attn.indexer.weights_proj.weight"),
)


def _sparse(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return kinds[layer] == "sparse" if kinds else layer >= config.get("first_k_dense_replace", 3)


def _unsupported(config: Config) -> Refusals:
    yield from DEEPSEEK_V3.unsupported(config)
    yield not config.get("q_lora_rank"), "q_lora_rank: null, from which the indexer has its queries"
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        yield not config.get(name), f"{name}: {config.get(name)}"
    shared = "shared" in (config.get("indexer_types") or ()) or (config.get("index_topk_freq") or 1) > 1
    shared = shared or "S" in (config.get("index_topk_pattern") or "")
    of_glm = config["model_type"] == "glm_moe_dsa"
    interleaved = config.get("indexer_rope_interleave", of_glm)
    yield (
        interleaved != of_glm,
        f"indexer_rope_interleave: {str(interleaved).lower()}, which transformers does not read",
    )
    yield (
        shared,
        "layers that share the indexer of an earlier layer (indexer_types, index_topk_freq, index_topk_pattern)",
    )


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    rows=(*DEEPSEEK_V3.rows, *_INDEXER),
    sparse=_sparse,
    unsupported=_unsupported,
    indexer="halves",
    adapters=False,
    no_cpu_engine="sparse attention",
)
GLM_MOE_DSA = replace(DEEPSEEK_V32, indexer="interleaved")
