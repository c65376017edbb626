"""Mends for mbridge 0.15.1 on transformers 5 and Megatron 0.14 and later. Each says what is wrong without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megarl.megatron import qwen2_5_vl
from megarl.megatron.model_checks import check_model, rotary_scaling, yarn_fields


def mend_config(hf_config: Any) -> None:
    """Give a transformers 5 configuration the fields that mbridge reads. Changes `hf_config` in place.

    Raises ValueError for what mbridge would leave out without a word.
    """
    check_model(hf_config.to_dict())
    if hf_config.model_type == "qwen2_5_vl":
        qwen2_5_vl.mend_config(hf_config)
    parameters = getattr(hf_config, "rope_parameters", None)
    if parameters is not None and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
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
    _merge_experts_over_their_own_ranks(Bridge)
    _mend_deepseek(DeepseekV3Bridge)
    qwen2_5_vl.install()


def _keep_shared_weights_apart(bridge: Any) -> None:
    """A model with tied embeddings writes its mapping into the class, and so into every later model."""
    init = bridge.__init__

    def own_mapping(self: Any, *args: Any, **kwargs: Any) -> None:
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        init(self, *args, **kwargs)

    bridge.__init__ = own_mapping


def _merge_experts_over_their_own_ranks(bridge: Any) -> None:
    """Without expert parallel, experts are gathered over tensor parallel, whatever expert-tensor parallel is."""
    merge = bridge._weight_merge_across_tp

    def merge_across_tp(self: Any, name: str, weights: list[torch.Tensor], param: torch.Tensor) -> torch.Tensor:
        where = self.mpu
        if ".mlp.experts.linear_fc" not in name or where.etp_size == where.tp_size:
            return merge(self, name, weights, param)
        if where.ep_size == 1:
            weights = [torch.empty_like(param) for _ in range(where.etp_size)]
            torch.distributed.all_gather(weights, param, group=where.etp_group)
        self.mpu = dataclasses.replace(where, tp_size=where.etp_size)  # it returns early where that is 1
        try:
            return merge(self, name, weights, param)
        finally:
            self.mpu = where

    bridge._weight_merge_across_tp = merge_across_tp


def _mend_deepseek(bridge: Any) -> None:
    from mbridge.core.safetensor_io import SafeTensorIO

    build = bridge._build_base_config

    def build_base_config(self: Any, **kwargs: Any) -> Any:
        names = {field.name for field in dataclasses.fields(self.TransformerConfigClass)}
        if "max_position_embeddings" not in names:  # renamed in Megatron 0.14
            kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
        scaling = rotary_scaling(self.hf_config.to_dict())
        if scaling["rope_type"] == "yarn":  # looked for by names that transformers 5 no longer has
            kwargs.update(yarn_fields(scaling))
        if (self.hf_config.n_group or 1) > 1:  # group-limited routing is not passed on
            kwargs["moe_router_num_groups"] = self.hf_config.n_group
            kwargs["moe_router_group_topk"] = self.hf_config.topk_group
        config = build(self, **kwargs)
        # The name before Megatron 0.14.
        # A platform that replaces latent attention may read it: see RELIED in the platform's recorded calls.
        config.max_position_embeddings = config.original_max_position_embeddings
        return config

    def get_safetensor_io(self: Any, path: str) -> Any:
        # mbridge's reader is made for FP8, which is refused, and insists on bfloat16, CUDA and triton.
        return SafeTensorIO(self._get_actual_hf_path(path))

    bridge._build_base_config = build_base_config
    bridge._get_safetensor_io = get_safetensor_io
