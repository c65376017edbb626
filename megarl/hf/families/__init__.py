"""Model families: one table each, from which loading, export, weight sync, checks and counts follow. Pure.

To add one, see docs/add_a_model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.hf.config import layer_kinds, text_fields
from megarl.hf.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from megarl.hf.families.ernie import ERNIE4_5_MOE
from megarl.hf.families.family import Family
from megarl.hf.families.gemma3 import GEMMA3, GEMMA3_TEXT
from megarl.hf.families.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from megarl.hf.families.gpt_oss import GPT_OSS
from megarl.hf.families.llama import LLAMA
from megarl.hf.families.mixtral import MINIMAX_M2, MIXTRAL
from megarl.hf.families.olmoe import OLMOE
from megarl.hf.families.qwen.qwen2_5_vl import QWEN2_5_VL
from megarl.hf.families.qwen.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from megarl.hf.families.qwen.qwen3_next import QWEN3_NEXT
from megarl.hf.families.qwen.qwen3_vl import DEEPSTACK, QWEN3_VL, QWEN3_VL_MOE
from megarl.hf.families.qwen.text import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from megarl.hf.families.sparse_attention import DEEPSEEK_V32, GLM_MOE_DSA
from megarl.hf.families.tables.family_table import FIELD, family_of_table

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3_TEXT,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "kimi_k2": KIMI_K2,
    "llama": LLAMA,
    "minimax_m2": MINIMAX_M2,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2": QWEN2,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
}
"""By `model_type`. Tests compare log-probs and gradients of each with transformers."""


def find_family(hf_config: Mapping[str, Any]) -> Family | None:
    """Return the family of a model's config.json: of the table in it (`model.table`), else of its `model_type`; None if unknown."""
    if (table := hf_config.get(FIELD)) is not None:
        return family_of_table(table)
    return FAMILIES.get(hf_config.get("model_type", ""))


def has_tower(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a model reads images: it has a vision tower, and its family trains it."""
    family = find_family(hf_config)
    return "vision_config" in hf_config and (family is None or family.tower)


def deepstack_layers(hf_config: Mapping[str, Any]) -> int:
    """Return the number of text layers, from the first on, that a model's vision tower feeds."""
    family = find_family(hf_config)
    if family is None or not family.deepstack:
        return 0
    return len((hf_config.get("vision_config") or {}).get("deepstack_visual_indexes", DEEPSTACK))


def has_zero_centered_norms(hf_config: dict[str, Any]) -> bool:
    """Return whether the model's norms add 1 to their weights."""
    family = find_family(hf_config)
    return family is not None and bool(family.settings(text_fields(hf_config)).get("layernorm_zero_centered_gamma"))


def has_sinks(hf_config: dict[str, Any]) -> bool:
    """Return whether the model's heads have attention sinks."""
    family = find_family(hf_config)
    return family is not None and family.sinks


def has_indexer(hf_config: dict[str, Any]) -> bool:
    """Return whether the model has sparse attention: an indexer selects the keys that a query sees."""
    family = find_family(hf_config)
    return family is not None and bool(family.indexer)


def has_delta_nets(hf_config: dict[str, Any]) -> bool:
    """Return whether some of the model's layers have a gated delta net in place of attention."""
    family = find_family(hf_config)
    return family is not None and family.delta_nets and "linear_attention" in layer_kinds(text_fields(hf_config))


def has_biased_softmax(hf_config: dict[str, Any]) -> bool:
    """Return whether the model's experts are scored by a softmax and chosen with a bias."""
    family = find_family(hf_config)
    return family is not None and family.biased_softmax


def has_windows(hf_config: dict[str, Any]) -> bool:
    """Return whether some of the model's layers have a sliding window."""
    family = find_family(hf_config)
    return family is not None and family.windows


def family_of(hf_config: dict[str, Any]) -> Family:
    """Return the family of a model's config.json. Raises ValueError for a model type without a table, or with two."""
    kind, family = hf_config.get("model_type"), find_family(hf_config)
    if kind is None:
        raise ValueError("The model's config.json has no model_type: transformers did not write it.")
    if FIELD in hf_config and kind in FAMILIES:
        raise ValueError(
            f"model.table names a table for a {kind!r} model, for which megarl has its own, tested table. Leave the key out."
        )
    if family is None:
        raise ValueError(
            f"model.path holds a {kind!r} model. megarl trains {', '.join(FAMILIES)} models, which are tested against "
            "transformers. docs/add_a_model.md shows how to add one; if Megatron-Bridge knows the model, `megarl model table` "
            "may write its table."
        )
    return family
