"""Multi-head latent attention in torch, as a backend of vLLM 0.18 to 0.23. `latent_attention.install` puts it in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import AttentionMetadataBuilder, SparseMLAAttentionImpl


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
