"""Replace functions of mbridge 0.15.1 and megatron-core 0.16.1 that have defects. docs/upstream.md lists each defect with its test.

Most defects of mbridge appear with transformers 5 or Megatron 0.14 and later.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megarl.megatron.model import qwen2_5_vl
from megarl.megatron.model.families import check_model, rotary_scaling, yarn_fields


def patch_config(hf_config: Any) -> None:
    """Add the fields that mbridge reads to a transformers 5 configuration, in place.

    Raises ValueError for settings that mbridge would ignore silently.
    """
    check_model(hf_config.to_dict())
    if hf_config.model_type == "qwen2_5_vl":
        qwen2_5_vl.patch_config(hf_config)
    parameters = getattr(hf_config, "rope_parameters", None)
    if parameters is not None and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
    if hf_config.model_type == "deepseek_v3":
        # Megatron's multi-token-prediction layers need labels, and RL does not train them.
        hf_config.num_nextn_predict_layers = None


def config_overrides(hf_config: Any) -> dict[str, Any]:
    """Return TransformerConfig fields that mbridge leaves at another model's value."""
    overrides: dict[str, Any] = {}
    if hf_config.model_type == "qwen3_moe":
        # mbridge assumes routing weights that are normalized over the chosen experts.
        overrides["moe_router_pre_softmax"] = not hf_config.norm_topk_prob
    return overrides


def fix_megatron() -> None:
    """Replace Megatron's functions that need a fix. Idempotent."""
    from megatron.core.tensor_parallel import mappings

    mappings._reduce = _reduce


def _reduce(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Return the sum of `tensor` over `group`; in place if it is contiguous.

    Megatron sums a contiguous copy but returns its argument: a non-contiguous gradient misses the other ranks' part.
    """
    if group.size() == 1:
        return tensor
    total = tensor.contiguous()
    torch.distributed.all_reduce(total, group=group)
    return total


def fix_mbridge() -> None:
    """Replace the methods of mbridge's classes that need a fix. Idempotent."""
    from mbridge.core.bridge import Bridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    if getattr(Bridge, "_megarl_fixed", False):
        return
    Bridge._megarl_fixed = True
    _copy_name_mapping(Bridge)
    _merge_experts_over_expert_ranks(Bridge)
    _fix_deepseek(DeepseekV3Bridge)
    qwen2_5_vl.install()


def _copy_name_mapping(bridge: Any) -> None:
    """Give each bridge a copy of the name mapping: mbridge writes tied embeddings into the class, for all later models."""
    init = bridge.__init__

    def copy_mapping(self: Any, *args: Any, **kwargs: Any) -> None:
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        init(self, *args, **kwargs)

    bridge.__init__ = copy_mapping


def _merge_experts_over_expert_ranks(bridge: Any) -> None:
    """Merge experts over expert-tensor-parallel ranks; without expert parallel, mbridge uses tensor-parallel ranks."""
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


def _fix_deepseek(bridge: Any) -> None:
    from mbridge.core.safetensor_io import SafeTensorIO

    build = bridge._build_base_config

    def build_base_config(self: Any, **kwargs: Any) -> Any:
        # Renamed in Megatron 0.14.
        kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
        scaling = rotary_scaling(self.hf_config.to_dict())
        if scaling["rope_type"] == "yarn":  # mbridge reads names that transformers 5 no longer has
            kwargs.update(yarn_fields(scaling))
        if (self.hf_config.n_group or 1) > 1:  # mbridge does not pass group-limited routing on
            kwargs["moe_router_num_groups"] = self.hf_config.n_group
            kwargs["moe_router_group_topk"] = self.hf_config.topk_group
        config = build(self, **kwargs)
        # The field's name before Megatron 0.14. A platform that replaces latent attention may read it: see RELIED in the
        # platform's recorded calls.
        config.max_position_embeddings = config.original_max_position_embeddings
        return config

    def get_safetensor_io(self: Any, path: str) -> Any:
        # mbridge's reader is for FP8, which megarl refuses, and requires bfloat16, CUDA and triton.

        return SafeTensorIO(self._get_actual_hf_path(path))

    bridge._build_base_config = build_base_config
    bridge._get_safetensor_io = get_safetensor_io
