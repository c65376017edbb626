"""Causal attention on torch's own kernel, for packed and for rectangular batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType


@dataclass(frozen=True)
class PaddedBatch:
    """Some sequences of a packed stream as a rectangle, padded on the right."""

    count: int  # sequences
    length: int  # of the longest one
    rows: torch.Tensor  # int64 [count * length]: index into the stream; padding repeats a sequence's last token
    real: torch.Tensor | None  # bool [count, 1, 1, length]: what is no padding; None where nothing is


@dataclass(frozen=True)
class PaddingPlan:
    """How a packed stream becomes rectangles, and where its tokens lie in their concatenation."""

    batches: list[PaddedBatch]
    places: torch.Tensor  # int64 [tokens of the stream]


@lru_cache(maxsize=64)
def plan_padding(lengths: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """Cut a stream of sequences of `lengths` into rectangles that are at least half full.

    Longest first, a rectangle takes sequences until padding would outweigh tokens. Cached, since every
    layer and the backward pass ask for the same plan.
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


class Attention(torch.nn.Module):
    """Megatron's core attention over query, key, value of shape [s, b, heads, d] or, packed, [t, heads, d].

    Packed sequences are padded into rectangles inside: right padding under a causal mask needs no mask of
    its own, since no token looks to its right. Context parallel, where `config` has it (vision towers do not),
    gathers keys and values over the ranks (each holds chunks r and 2n-1-r of a sequence that is cut into 2n).
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
        """Context of shape [s, b, heads * d], or [t, heads * d] for packed sequences."""
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
        offsets = (packed_seq_params.cu_seqlens_q if offsets is None else offsets).tolist()
        lengths = [(end - start) // n for start, end in pairwise(offsets)]
        out = self._packed_over_ranks(query, key, value, lengths) if n > 1 else self._packed(query, key, value, lengths)
        return out.reshape(out.shape[0], -1)

    def _rectangular(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None
        if self.ranks > 1:
            mask = self._mask_over_ranks(query.shape[2], query.device)
        elif attention_mask is not None and self.mask_type != AttnMaskType.causal:
            mask = ~attention_mask  # Megatron's masks say what is hidden, torch's what is seen
        out = self._attend(query, key, value, mask).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        plan = plan_padding(tuple(lengths), query.device)
        outputs = []
        for batch in plan.batches:
            q, k, v = (
                x.index_select(0, batch.rows).view(batch.count, batch.length, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            mask = None if self._causal else batch.real
            outputs.append(self._attend(q, k, v, mask).transpose(1, 2).flatten(0, 1))
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, plan.places)

    def _packed_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """Sequence by sequence: each has a mask of its own, from its length. `lengths` are a rank's share."""
        n = self.ranks
        key, value = (x.view(n, -1, *x.shape[1:]) for x in (key, value))
        outputs, start = [], 0
        for length in lengths:
            part = slice(start, start + length)
            q = query[part].unsqueeze(0).transpose(1, 2)
            k, v = (x[:, part].reshape(1, -1, *x.shape[2:]).transpose(1, 2) for x in (key, value))
            outputs.append(self._attend(q, k, v, self._mask_over_ranks(length, query.device))[0].transpose(0, 1))
            start += length
        return torch.cat(outputs)

    @property
    def _causal(self) -> bool:
        return self.mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[b, heads, s, d] of query, key and value; `mask` is true where a query sees a key."""
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

    def _mask_over_ranks(self, share: int, device: torch.device) -> torch.Tensor:
        """[share, n * share]: this rank's queries by all ranks' keys, for a sequence of n * share tokens."""
        n, chunk = self.ranks, share // 2
        steps = torch.arange(chunk, device=device)
        places = [torch.cat([rank * chunk + steps, (2 * n - 1 - rank) * chunk + steps]) for rank in range(n)]
        return places[self.cp.rank()][:, None] >= torch.cat(places)[None, :]
