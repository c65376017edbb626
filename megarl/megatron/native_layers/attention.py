"""Attention for packed and rectangular batches: a varlen kernel if available, else torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.nn.attention.bias import causal_lower_right

from megarl.megatron.host_offsets import host_offsets
from megarl.megatron.native_layers.fused_kernels import packed_attention
from megarl.megatron.native_layers.masked_attention import masked_attention


@dataclass(frozen=True)
class PaddedBatch:
    """Some sequences of a packed stream as a rectangle with right padding."""

    count: int  # sequences
    length: int  # of the longest sequence
    rows: torch.Tensor  # int64 [count * length]: index into the stream; padding repeats a sequence's last token
    real: torch.Tensor | None  # bool [count, 1, 1, length]: true for tokens, false for padding; None without padding


@dataclass(frozen=True)
class PaddingPlan:
    """Rectangles of a packed stream, and the index of each of its tokens in their concatenation."""

    batches: list[PaddedBatch]
    places: torch.Tensor  # int64 [tokens of the stream]

    def apply(self, function: Callable[..., torch.Tensor], *streams: torch.Tensor) -> torch.Tensor:
        """Return the results of `function` for all rectangles as a stream [tokens, ...].

        streams: [tokens, ...] each. function: receives a rectangle's `PaddedBatch` and its part of each stream [count, length,
        ...], and returns [count, length, ...].
        """
        outputs = []
        for batch in self.batches:
            parts = (x.index_select(0, batch.rows).view(batch.count, batch.length, *x.shape[1:]) for x in streams)
            outputs.append(function(batch, *parts).flatten(0, 1))
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, self.places)


@lru_cache(maxsize=64)
def plan_padding(lengths: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """Cut a stream of sequences of `lengths` into rectangles that are at least half full.

    Longest first, a rectangle takes sequences until padding would exceed tokens. Cached: every layer and the backward
    pass use the same plan.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    if len(lengths) * max(lengths) <= 2 * starts[-1]:
        rectangles = [list(range(len(lengths)))]
    else:
        rectangles = []
        filled = 0
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not lengths[i]:
                continue
            if rectangles and (len(rectangles[-1]) + 1) * lengths[rectangles[-1][0]] <= 2 * (filled + lengths[i]):
                rectangles[-1].append(i)
                filled += lengths[i]
            else:
                rectangles.append([i])
                filled = lengths[i]
    places = torch.empty(starts[-1], dtype=torch.int64)
    batches, offset = [], 0
    for members in rectangles:
        longest = max(lengths[i] for i in members)
        steps = torch.arange(longest)
        rows = torch.stack([starts[i] + steps.clamp(max=max(lengths[i] - 1, 0)) for i in members])
        for row, i in enumerate(members):
            places[starts[i] : starts[i + 1]] = offset + row * longest + steps[: lengths[i]]
        filling = torch.tensor([lengths[i] for i in members])
        real = None if int(filling.min()) == longest else (steps < filling[:, None])[:, None, None].to(device)
        batches.append(PaddedBatch(len(members), longest, rows.flatten().clamp(max=starts[-1] - 1).to(device), real))
        offset += len(members) * longest
    return PaddingPlan(batches, places.to(device))


@dataclass(frozen=True)
class Chunks:
    """One chunk of every sequence on a context-parallel rank, and the keys that it attends to, in order."""

    queries: torch.Tensor  # int64 [queries]: index into the rank's stream
    keys: torch.Tensor  # int64 [keys]: index into the concatenated streams of all ranks
    query_offsets: torch.Tensor  # int32 [sequences + 1]
    key_offsets: torch.Tensor  # int32 [sequences + 1]
    query_lengths: list[int]
    key_lengths: list[int]


@dataclass(frozen=True)
class ChunkPlan:
    """The two chunks of each sequence on a rank, and the index of its tokens in their concatenated outputs."""

    chunks: tuple[Chunks, Chunks]
    places: torch.Tensor  # int64 [tokens of the rank]


@lru_cache(maxsize=64)
def plan_chunks(lengths: tuple[int, ...], ranks: int, rank: int, device: torch.device) -> ChunkPlan:
    """Split a packed stream over context-parallel ranks. `lengths`: a rank's tokens of each sequence, even numbers."""
    share = torch.tensor(lengths)
    starts, half, total = share.cumsum(0) - share, share // 2, sum(lengths)
    both_chunks, order = [], []
    for number in (rank, 2 * ranks - 1 - rank):
        begin = starts + (half if number >= ranks else 0)
        queries = torch.cat([torch.arange(b, b + h) for b, h in zip(begin.tolist(), half.tolist(), strict=True)])
        sizes, seen = half.tolist(), (half * (number + 1)).tolist()
        both_chunks.append(
            Chunks(
                queries.to(device),
                _tokens_of_chunks(lengths, ranks, number + 1).to(device),
                _offsets(sizes, device),
                _offsets(seen, device),
                sizes,
                seen,
            )
        )
        order.append(queries)
    places = torch.empty(total, dtype=torch.int64)
    places[torch.cat(order)] = torch.arange(total)
    return ChunkPlan((both_chunks[0], both_chunks[1]), places.to(device))


@lru_cache(maxsize=64)
def sequence_order(lengths: tuple[int, ...], ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation from the concatenated streams of all context-parallel ranks to whole sequences, and its inverse.

    Both int64 [tokens]. `lengths`: as for `plan_chunks`.
    """
    in_order = _tokens_of_chunks(lengths, ranks, 2 * ranks)
    return in_order.to(device), in_order.argsort().to(device)


def _tokens_of_chunks(lengths: tuple[int, ...], ranks: int, count: int) -> torch.Tensor:
    """Return the first `count` chunks of every sequence: int64, index into the concatenated streams of all ranks."""
    total, start, tokens = sum(lengths), 0, []
    for length in lengths:
        size = length // 2
        for chunk in range(count):
            # Rank min(c, 2n-1-c) holds chunk c of a sequence, in the first half of its tokens for c < n.
            owner, second = min(chunk, 2 * ranks - 1 - chunk), chunk >= ranks
            first = owner * total + start + (size if second else 0)
            tokens.append(torch.arange(first, first + size))
        start += length
    return torch.cat(tokens)


def _offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


class NativeAttention(torch.nn.Module):
    """Megatron's core attention: query, key, value are [s, b, heads, d] or, packed, [t, heads, d].

    Packed sequences use a varlen kernel if available, else right-padded rectangles: under a causal mask, right padding
    needs no mask, since no token attends to its right. Context parallel (from `config`; vision towers have none)
    gathers keys and values over the ranks: rank r holds chunks r and 2n-1-r of a sequence cut into 2n chunks, and a
    chunk attends causally to itself and fully to all chunks before it.

    With sinks or a sliding window, attention is `masked_attention`. A sink is a parameter of each head under the name that
    Transformer Engine's layer has: `softmax_offset`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale, self.mask_type = softmax_scale, attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.ranks = config.context_parallel_size
        has_group = pg_collection is not None and hasattr(pg_collection, "cp")
        self.cp = pg_collection.cp if has_group else parallel_state.get_context_parallel_group()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = _sinks(config) if config.softmax_type == "learnable" else None
        self.masked = self.window is not None or self.softmax_offset is not None
        assert not self.masked or (self._causal and not self.dropout), "no family has sinks or windows with these"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the context, [s, b, heads * d], or [t, heads * d] for packed sequences."""
        n = self.ranks
        if n > 1:
            both = torch.cat([key, value], -1).contiguous()
            both = tensor_parallel.gather_from_sequence_parallel_region(
                both, tensor_parallel_output_grad=True, group=self.cp
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        if packed_seq_params is None:
            return self._rectangular(query, key, value, attention_mask)
        offsets = packed_seq_params.cu_seqlens_q_padded
        offsets = packed_seq_params.cu_seqlens_q if offsets is None else offsets
        lengths = tuple((end - start) // n for start, end in pairwise(host_offsets(offsets)))
        if n > 1:
            out = self._packed_over_ranks(query, key, value, lengths)
        elif (kernel := self._packed_kernel(query)) is not None:
            longest = max(lengths)
            out = self._by_kernel(kernel, query, key, value, offsets, offsets, longest, longest)
        else:
            out = self._packed(query, key, value, lengths)
        return out.reshape(out.shape[0], -1)

    def _rectangular(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None
        if self.ranks > 1:
            chunks = torch.cat(
                [self._attend(q, k, v, _last_keys(q, k)) for q, k, v in self._chunks(query, key, value)], 2
            )
            out = chunks.permute(2, 0, 1, 3)
        else:
            if attention_mask is not None and self.mask_type != AttnMaskType.causal:
                mask = ~attention_mask  # Megatron's mask is true for hidden keys, torch's for visible keys
            out = self._attend(query, key, value, mask).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        def attend(batch: PaddedBatch, *parts: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in parts)
            return self._attend(q, k, v, None if self._causal else batch.real).transpose(1, 2)

        return plan_padding(lengths, query.device).apply(attend, query, key, value)

    def _packed_kernel(self, query: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        if self.masked or (self.dropout and self.training):
            return None
        return packed_attention(query.device, query.dtype).function

    def _by_kernel(
        self,
        kernel: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_offsets: torch.Tensor,
        key_offsets: torch.Tensor,
        longest_query: int,
        longest_key: int,
    ) -> torch.Tensor:
        """Call a varlen kernel. Values narrower than keys (multi-head latent attention) are zero-padded and cut again."""
        width = value.shape[-1]
        value = F.pad(value, (0, key.shape[-1] - width))
        offsets = (x.to(query.device, torch.int32) for x in (query_offsets, key_offsets))
        out = kernel(
            query.contiguous(), key.contiguous(), value.contiguous(), *offsets, longest_query, longest_key,
            causal=self._causal, scale=self.scale,
        )  # fmt: skip
        return out[..., :width]

    def _packed_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Compute attention over context-parallel ranks. `lengths`: a rank's tokens of each sequence (two chunks)."""
        plan = plan_chunks(lengths, self.ranks, self.cp.rank(), query.device)
        kernel = self._packed_kernel(query)
        outputs = []
        for chunks in plan.chunks:
            q = query.index_select(0, chunks.queries)
            k, v = (x.index_select(0, chunks.keys) for x in (key, value))
            if kernel is not None:
                longest = max(chunks.query_lengths), max(chunks.key_lengths)
                outputs.append(self._by_kernel(kernel, q, k, v, chunks.query_offsets, chunks.key_offsets, *longest))
                continue
            sequences = zip(
                q.split(chunks.query_lengths),
                k.split(chunks.key_lengths),
                v.split(chunks.key_lengths),
                strict=True,
            )
            for sequence in sequences:
                q1, k1, v1 = (x.unsqueeze(0).transpose(1, 2) for x in sequence)
                outputs.append(self._attend(q1, k1, v1, _last_keys(q1, k1))[0].transpose(0, 1))
        return torch.cat(outputs).index_select(0, plan.places)

    def _chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield this rank's two chunks of equally long sequences [b, heads, s, d], each with its visible keys and values."""
        n, rank = self.ranks, self.cp.rank()
        share = query.shape[2]
        chunk = share // 2
        key, value = (x.split(chunk, 2) for x in (key, value))
        order = [number for other in range(n) for number in (other, 2 * n - 1 - other)]
        for half, number in enumerate((rank, 2 * n - 1 - rank)):
            seen = [order.index(before) for before in range(number + 1)]
            k, v = (torch.cat([x[i] for i in seen], 2) for x in (key, value))
            yield query[:, :, half * chunk : (half + 1) * chunk], k, v

    @property
    def _causal(self) -> bool:
        return self.mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute SDPA of query, key and value [b, heads, s, d]; `mask` is true where a query sees a key."""
        if self.masked:
            return masked_attention(query, key, value, window=self.window, sinks=self.softmax_offset, scale=self.scale)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self._causal and mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the sinks to Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _sinks(config: Any) -> torch.nn.Parameter:
    """Return the sinks of this rank's heads, all 0."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    # `current_device` is a device on the CPU platform, a number on CUDA.
    sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device()))
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def _last_keys(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the causal mask of queries that are the last positions of their keys; torch's device kernels treat it as a flag.

    None if queries and keys are equally many (plain causal mask), and for meta tensors: their kernel takes no mask.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys or query.device.type == "meta":
        return None
    return causal_lower_right(queries, keys)
