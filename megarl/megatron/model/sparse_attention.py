"""Sparse attention of DeepSeek-V3.2 and GLM-5: an indexer selects the keys that a query sees (arXiv 2512.02556).

Megatron's layer takes no packed sequences, and computes its indexer in bfloat16 alone with a further package. Here the indexer
is frozen, as its weights are buffers: the selection has no gradient. Attention uses masks of the squared length.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.hf.families.slices import Config
from megarl.megatron.native_layers.attention import NativeAttention, PaddedBatch, plan_chunks, plan_padding
from megarl.megatron.native_layers.masked_attention import visible_keys
from megarl.megatron.native_layers.norm_rotary import rms_norm, rotate_packed

_NORM_EPSILON = 1e-6  # of the indexer's LayerNorm: hard-coded in the published model's code


class IndexerSizes(NamedTuple):
    """Sizes of an indexer. `interleaved`: rotated elements are neighbors (GLM-5), not in two halves (DeepSeek-V3.2)."""

    heads: int
    size: int  # of a head
    rotated: int  # elements of a head
    keys: int  # that a query sees
    interleaved: bool


class IndexStreams(NamedTuple):
    """Results of an indexer for a packed stream of tokens."""

    query: torch.Tensor  # [tokens, heads, size]
    weight: torch.Tensor  # float32 [tokens, heads]: of each head in a query's scores
    key: torch.Tensor  # [tokens, size]


class Indexer(torch.nn.Module):
    """Scores keys for each query. Each tensor-parallel rank has all weights, which are not trained."""

    def __init__(self, config: Any, sizes: IndexerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        shapes = {
            "wq_b": (sizes.heads * sizes.size, config.q_lora_rank),
            "wk": (sizes.size, config.hidden_size),
            "k_norm_weight": (sizes.size,),
            "k_norm_bias": (sizes.size,),
            "weights_proj": (sizes.heads, config.hidden_size),
        }
        for name, shape in shapes.items():
            values = torch.zeros(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.register_buffer(name, values)

    def forward(self, hidden: torch.Tensor, latent: torch.Tensor, rotary: dict[str, Any]) -> IndexStreams:
        """Index `hidden` [tokens, hidden] with the queries' normed latents [tokens, rank].

        `rotary`: arguments of `rotate_packed`.
        """
        sizes = self.sizes
        query = F.linear(latent, self.wq_b).unflatten(-1, (sizes.heads, sizes.size))
        key = F.linear(hidden, self.wk)
        key = F.layer_norm(key, key.shape[-1:], self.k_norm_weight, self.k_norm_bias, _NORM_EPSILON)
        weight = F.linear(hidden, self.weights_proj).float() * sizes.heads**-0.5
        return IndexStreams(self._rotate(query, rotary), weight, self._rotate(key.unsqueeze(1), rotary).squeeze(1))

    def _rotate(self, x: torch.Tensor, rotary: dict[str, Any]) -> torch.Tensor:
        rotated, rest = x.split([self.sizes.rotated, self.sizes.size - self.sizes.rotated], -1)
        rotated = rotate_packed(rotated, multi_latent_attention=self.sizes.interleaved, **rotary)
        return torch.cat([rotated, rest], -1)


class SparseLatentAttention(MLASelfAttention):
    """Multi-head latent attention with an indexer, which selects the keys of its core attention (a `SparseAttention`)."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, *, sizes: IndexerSizes, **arguments: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, **arguments)
        self.indexer = Indexer(config, sizes)
        self.core_attention.keys = sizes.keys

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: Any = None,
        **arguments: Any,
    ) -> Any:
        """Return Megatron's queries, keys, values and latents, and index the tokens for the core attention."""
        results = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **arguments
        )
        with torch.no_grad():
            self.core_attention.streams = self._index(hidden_states.squeeze(1), results[3], packed_seq_params)
        return results

    def _index(self, hidden: torch.Tensor, latent: torch.Tensor, packed: Any) -> IndexStreams:
        """Index this context-parallel rank's tokens. `latent`: of the queries, before its norm."""
        latent = rms_norm(latent, self.linear_q_up_proj.layer_norm_weight, self.config.layernorm_epsilon)
        group = parallel_state.get_tensor_model_parallel_group()
        if self.config.sequence_parallel and group.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden.contiguous(), group=group)
            latent = gather_from_sequence_parallel_region(latent.contiguous(), group=group)
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden.unsqueeze(1), self.config, packed)
        angles, scale = self.rotary_pos_emb(length, packed_seq=True), 1.0
        if self.config.rope_type == "yarn":
            angles, scale = angles
        offsets = packed.cu_seqlens_q_padded
        rotary = {
            "cu_seqlens": packed.cu_seqlens_q if offsets is None else offsets,
            "freqs": angles,
            "mscale": scale,
            "cp_group": parallel_state.get_context_parallel_group(),
        }
        streams: IndexStreams = self.indexer(hidden, latent, rotary)
        return streams

    def _checkpointed_attention_forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, packed_seq_params: Any = None, **_: Any
    ) -> Any:
        """Compute the core attention, and again in the backward pass, with the same streams of the indexer."""
        streams = self.core_attention.streams

        def attend(query: Any, key: Any, value: Any) -> Any:
            self.core_attention.streams = streams
            return self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)

        return tensor_parallel.checkpoint(attend, False, query, key, value)


class SparseAttention(NativeAttention):
    """Causal attention of packed sequences to the keys that an indexer selects, or to all keys if they are not more.

    `streams` is set before each call, `keys` once.
    """

    streams: IndexStreams
    keys: int

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        def attend(_: PaddedBatch, *parts: torch.Tensor) -> torch.Tensor:
            q, k, v, *streams = parts
            return self._attend_to_selected(q, k, v, IndexStreams(*streams))

        return plan_padding(lengths, query.device).apply(attend, query, key, value, *self.streams)

    def _packed_kernel(self, query: torch.Tensor) -> None:
        return None

    def _packed_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        plan, streams = plan_chunks(lengths, self.ranks, self.cp.rank(), query.device), self.streams
        of_keys = (key, value, gather_from_sequence_parallel_region(streams.key.contiguous(), group=self.cp))
        outputs = []
        for chunks in plan.chunks:
            queries = (x.index_select(0, chunks.queries) for x in (query, streams.query, streams.weight))
            keys = (x.index_select(0, chunks.keys) for x in of_keys)
            split = (*(x.split(chunks.query_lengths) for x in queries), *(x.split(chunks.key_lengths) for x in keys))
            for sequence in zip(*split, strict=True):
                q, index_query, weight, k, v, index_key = (x.unsqueeze(0) for x in sequence)
                index = IndexStreams(index_query, weight, index_key)
                outputs.append(self._attend_to_selected(q, k, v, index)[0])
        return torch.cat(outputs).index_select(0, plan.places)

    def _attend_to_selected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: IndexStreams
    ) -> torch.Tensor:
        """Return [b, s, heads, d] for queries [b, s, heads, d] that are the last of the keys [b, t, heads, d]."""
        mask = selected_keys(index, self.keys).unsqueeze(1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale).transpose(1, 2)


@torch.no_grad()
def selected_keys(index: IndexStreams, keys: int) -> torch.Tensor:
    """Return the mask [b, s, t] of the `keys` keys with the largest scores among the visible keys of each query.

    `index`: of s queries and t keys, of which the queries are the last. A head's score of a key is relu(q k / sqrt(size)).
    """
    queries, length = index.query.shape[1], index.key.shape[1]
    visible = visible_keys(queries, length, None, False, index.key.device)
    if length <= keys:
        return visible.expand(len(index.key), -1, -1)
    transposed = index.key.float().transpose(1, 2) * index.key.shape[-1] ** -0.5
    scores = index.weight.new_zeros(len(index.key), queries, length)
    for head in range(index.query.shape[2]):
        scores += index.weight[..., head, None] * (index.query[:, :, head].float() @ transposed).relu_()
    best = scores.masked_fill_(~visible, -torch.inf).topk(keys, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible


def install(config: Config, layers: list[Any], *, interleaved: bool) -> None:
    """Replace latent attention in the specs of a block's `layers`. `config`: config.json, from `text_fields`."""
    sizes = IndexerSizes(
        config["index_n_heads"],
        config["index_head_dim"],
        config["qk_rope_head_dim"],
        config["index_topk"],
        interleaved,
    )
    for number, layer in enumerate(layers):
        layers[number] = copy.deepcopy(layer)  # layers share their specs, and models in a process their modules
        attention = layers[number].submodules.self_attention
        attention.module, attention.params = SparseLatentAttention, {**attention.params, "sizes": sizes}
        attention.submodules.core_attention = SparseAttention
