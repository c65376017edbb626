"""Latent attention in torch for vLLM versions whose CPU backend has none, so that their engines run tiny DeepSeek-V3 models.

vLLM's layers, loader and reload stay in place; the kernel of attention is all that this file replaces. Imported in vLLM's workers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionMetadataBuilder, SparseMLAAttentionImpl

_REFUSAL = "MLA is not supported on CPU"


def install() -> None:
    """Use `Backend` where vLLM's own platform for CPUs refuses latent attention. Call before the model is built."""
    if _REFUSAL not in inspect.getsource(CpuPlatform.get_attn_backend_cls):
        return
    original = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **kwargs):
        if attn_selector_config.use_mla:
            return f"{Backend.__module__}.{Backend.__name__}"
        return original(cls, selected_backend, attn_selector_config, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    process = UnquantizedLinearMethod.process_weights_after_loading

    def process_weights_after_loading(self, layer):
        if getattr(layer, "keeps_weight", False):  # repacked for a CPU it would be empty when attention reads it
            layer.cpu_linear = torch.nn.functional.linear
        else:
            process(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
    if hasattr(mla_attention, "get_mla_prefill_backend"):  # 0.23; its prefill is never called, see `Attention`
        mla_attention.get_mla_prefill_backend = lambda config: SimpleNamespace


class Backend(mla_attention.MLACommonBackend):
    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA"

    @staticmethod
    def get_impl_cls() -> type:
        return Attention

    @staticmethod
    def get_builder_cls() -> type:
        return Builder


@dataclass
class Metadata:
    """One batch: tokens of request i are rows starts[i] to starts[i + 1], the last of its lengths[i] tokens."""

    num_actual_tokens: int
    starts: list[int]
    lengths: list[int]
    blocks: torch.Tensor  # [requests, blocks of a request]


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        batch = common_attn_metadata
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
        return Metadata(batch.num_actual_tokens, starts, lengths, batch.block_table_tensor)


class Attention(SparseMLAAttentionImpl[Metadata]):
    """Multi-query attention over the latent cache, for prompts too. vLLM calls `forward_mqa` alone for a sparse kind."""

    can_return_lse_for_decode = False

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        self.scale, self.rank = scale, kwargs["kv_lora_rank"]
        kwargs["kv_b_proj"].keeps_weight = True
        self.q_pad_num_heads = None
        self.supports_quant_query_input = False

    def do_kv_cache_update(
        self, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        if kv_cache.numel():
            slots = slot_mapping.flatten().long()
            latent = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slots)]
            kv_cache.view(-1, kv_cache.shape[-1])[slots[slots >= 0]] = latent[slots >= 0]

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Metadata, layer: Any) -> Any:
        """[tokens, heads, latent + rotary] -> [tokens, heads, latent]."""
        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        output = queries.new_zeros(*queries.shape[:2], self.rank)
        size = kv_c_and_k_pe_cache.shape[1]
        cache = kv_c_and_k_pe_cache.view(-1, kv_c_and_k_pe_cache.shape[-1])
        for request, length in enumerate(attn_metadata.lengths):
            first, last = attn_metadata.starts[request : request + 2]
            places = torch.arange(length)
            keys = cache[attn_metadata.blocks[request, places // size].long() * size + places % size]
            scores = torch.einsum("qhd,kd->qhk", queries[first:last], keys) * self.scale
            hidden = places[None] > torch.arange(length - (last - first), length)[:, None]
            weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
            output[first:last] = torch.einsum("qhk,kd->qhd", weights, keys[:, : self.rank])
        return output, None
