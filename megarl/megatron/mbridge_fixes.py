"""Mends for mbridge 0.15.1 on transformers 5 and Megatron 0.14 and later. Each says what is wrong without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megarl.megatron import qwen2_5_vl


def mend_config(hf_config: Any) -> None:
    """Give a transformers 5 configuration the fields that mbridge reads. Changes `hf_config` in place.

    Raises ValueError for what mbridge would leave out without a word.
    """
    if hf_config.model_type == "qwen2_5_vl":
        qwen2_5_vl.mend_config(hf_config)
    elif getattr(hf_config, "vision_config", None) is not None:
        raise ValueError(
            f"model.path holds a {hf_config.model_type!r} model, which reads images; of those megarl trains qwen2_5_vl."
        )
    parameters = getattr(hf_config, "rope_parameters", None)
    if parameters is not None and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
    kind = (parameters or getattr(hf_config, "rope_scaling", None) or {}).get("rope_type", "default")
    if kind not in ("default", None) and hf_config.model_type != "deepseek_v3":
        raise ValueError(
            f"The model's config.json asks for rotary scaling {kind!r}, which mbridge does not carry over for "
            f"{hf_config.model_type}: the trainer would compute other positions than the engine. Remove rope_scaling "
            "from config.json where the context length allows it."
        )
    if hf_config.model_type == "qwen3_moe" and (hf_config.mlp_only_layers or hf_config.decoder_sparse_step != 1):
        raise ValueError(
            "The model's config.json makes some layers dense (mlp_only_layers, decoder_sparse_step), which mbridge "
            "cannot map for qwen3_moe. Use a model whose layers are all mixtures of experts."
        )
    if hf_config.model_type == "deepseek_v3":
        # Without labels Megatron's multi-token-prediction layers cannot run, and RL does not train them.
        hf_config.num_nextn_predict_layers = None


def config_overrides(hf_config: Any) -> dict[str, Any]:
    """TransformerConfig fields that mbridge leaves at another model's value."""
    overrides: dict[str, Any] = {}
    if hf_config.model_type == "qwen3_moe":
        # mbridge assumes weights that are normalised over the chosen experts.
        overrides["moe_router_pre_softmax"] = not hf_config.norm_topk_prob
    return overrides


def install() -> None:
    """Replace the methods of mbridge's classes that need it. Idempotent."""
    from mbridge.core.bridge import Bridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    if getattr(Bridge, "_megarl_mended", False):
        return
    Bridge._megarl_mended = True
    _keep_shared_weights_apart(Bridge)
    _mend_deepseek(DeepseekV3Bridge)
    qwen2_5_vl.install()


def _keep_shared_weights_apart(bridge: Any) -> None:
    """A model with tied embeddings writes its mapping into the class, and so into every later model."""
    init = bridge.__init__

    def own_mapping(self: Any, *args: Any, **kwargs: Any) -> None:
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        init(self, *args, **kwargs)

    bridge.__init__ = own_mapping


def _mend_deepseek(bridge: Any) -> None:
    from mbridge.core.safetensor_io import SafeTensorIO

    build, open_weights = bridge._build_base_config, bridge._get_safetensor_io

    def build_base_config(self: Any, **kwargs: Any) -> Any:
        names = {field.name for field in dataclasses.fields(self.TransformerConfigClass)}
        if "max_position_embeddings" not in names:  # renamed in Megatron 0.14
            kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
        scaling = getattr(self.hf_config, "rope_scaling", None) or {}
        if scaling.get("rope_type") == "yarn":  # transformers 5 no longer calls it "type"
            kwargs["rope_type"] = "yarn"
        if (self.hf_config.n_group or 1) > 1:  # group-limited routing is not passed on
            kwargs["moe_router_num_groups"] = self.hf_config.n_group
            kwargs["moe_router_group_topk"] = self.hf_config.topk_group
        return build(self, **kwargs)

    def get_safetensor_io(self: Any, path: str) -> Any:
        # The reader of FP8 weights insists on bfloat16, CUDA and triton, also where nothing is FP8.
        if getattr(self.hf_config, "quantization_config", None):
            if self.dtype != torch.bfloat16:
                raise ValueError("FP8 weights are read into bfloat16: set model.dtype: bfloat16.")
            return open_weights(self, path)
        return SafeTensorIO(self._get_actual_hf_path(path))

    bridge._build_base_config = build_base_config
    bridge._get_safetensor_io = get_safetensor_io
