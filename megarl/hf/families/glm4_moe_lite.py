"""GLM-4.7-Flash: DeepSeek-V3's architecture, with the kind of each layer in config.json."""

from __future__ import annotations

from dataclasses import replace

from megarl.hf.families.deepseek_v3 import DEEPSEEK_V3
from megarl.hf.families.slices import Config


def _sparse(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return kinds[layer] == "sparse" if kinds else layer >= config.get("first_k_dense_replace", 1)


GLM4_MOE_LITE = replace(DEEPSEEK_V3, sparse=_sparse)
