"""A micro batch, and its layout for the model: one packed stream, or a padded rectangle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megarl.megatron.images import ImageLayout, Images, StreamImages, batch_places, batch_positions, check_images

if TYPE_CHECKING:
    from megarl.megatron.moe.recorded_routing import Routing


@dataclass(frozen=True)
class Candidates:
    """K alternative tokens per token of a micro batch, with a teacher's log-probs.

    Kept on the host: they are large and only the update reads them.
    """

    tokens: torch.Tensor  # int32 [T, K]; -1: outside this model's vocabulary
    log_probs: torch.Tensor  # float32 [T, K]


@dataclass
class MicroBatch:
    """Concatenated sequences with per-token vectors.

    Index t of every vector describes token t (the index law). Example: two sequences of 3 and 2 tokens:
    ``MicroBatch(tokens=tensor([5, 8, 2, 7, 2]), lengths=[3, 2], vectors={"advantages": tensor([...])})``.
    """

    tokens: torch.Tensor  # int64 [T]
    lengths: list[int]  # per sequence; they sum to T
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # each [T]
    routing: Routing | None = None  # mixture of experts: to be recorded or replayed; None: routers choose freely
    images: Images | None = None  # None: text only
    counted: list[bool] | None = None  # per sequence: whether the loss counts it; None: all
    candidates: Candidates | None = None  # further tokens, for losses that read their log-probs
    # int64 [T]: the token whose log-prob is computed at each index. None: the token at that index.
    predicted: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert sum(self.lengths) == len(self.tokens), (self.lengths, len(self.tokens))
        assert self.counted is None or len(self.counted) == len(self.lengths), (self.counted, self.lengths)
        for name, vector in self.vectors.items():
            assert len(vector) == len(self.tokens), (name, len(vector), len(self.tokens))
        assert self.candidates is None or len(self.candidates.tokens) == len(self.tokens)
        assert self.predicted is None or len(self.predicted) == len(self.tokens)

    @property
    def counted_tokens(self) -> int:
        """Number of tokens in sequences that the loss counts, prompts included."""
        counted = self.counted or [True] * len(self.lengths)
        return sum(length for length, counts in zip(self.lengths, counted, strict=True) if counts)


@dataclass(frozen=True)
class PackedStream:
    """A micro batch as the model reads it on one context-parallel rank.

    The stream is the concatenation of the sequences, each padded to `padded_lengths`. Under context parallel each
    sequence is cut into 2n chunks and rank r holds chunks r and 2n-1-r, which balances causal attention.
    The model reads the stream as a batch of one (`packed`), or as sequences of equal padded length [b, s]. Its output
    rows have s before b; `labels`, `sequences` and `row_tokens` are in this order. `sources` and `targets` pair each
    row (over all ranks, concatenated) with the token it predicts.
    """

    packed: bool
    tokens: torch.Tensor  # int64 [share]: this rank's part of the stream, sequence by sequence
    positions: torch.Tensor  # int64 [share], or [3, share] for a model that reads images: position in the sequence
    labels: torch.Tensor  # int64 [share]: the next token, or `MicroBatch.predicted` of it; 0 at the end of a sequence
    candidates: torch.Tensor | None  # int32 [share, K], on the host: alternatives to the next token
    sequences: torch.Tensor  # int64 [share]: sequence index; -1 for padding and for sequences that do not count
    lengths: torch.Tensor  # int64 [sequences]: without padding
    cu_seqlens: torch.Tensor  # int32 [sequences + 1]: offsets of the padded sequences in the whole stream
    offsets: tuple[int, ...]  # `cu_seqlens` on the host
    longest: int  # padded length of the longest sequence
    sources: torch.Tensor  # int64 [T - sequences]
    targets: torch.Tensor  # int64 [T - sequences]: index into the micro batch
    total: int  # T
    row_tokens: torch.Tensor  # int64 [share]: micro-batch index of each row's token; -1: padding
    routing: Routing | None
    images: StreamImages | None

    @property
    def share(self) -> int:
        return len(self.tokens)

    def as_read(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape `tokens` or `positions` from [..., share] to [..., b, s]."""
        return flat.unflatten(-1, (1 if self.packed else len(self.lengths), -1))


def padded_lengths(
    lengths: list[int], *, context_parallel: int, sequence_parallel: int, packing: bool = True
) -> list[int]:
    """Return each sequence's length in the stream, padded as splitting it over ranks requires.

    Context parallel cuts each sequence into 2 x ranks chunks. Sequence parallel cuts a rank's part of the stream into
    `sequence_parallel` shards: the last sequence gets that padding. Without `packing`, every sequence has the padded
    length of the longest.
    """
    unit = 2 * context_parallel if context_parallel > 1 else 1
    whole = math.lcm(unit, context_parallel * sequence_parallel)
    if not packing:
        return [math.ceil(max(lengths) / whole) * whole] * len(lengths)
    padded = [math.ceil(length / unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % whole
    return padded


def pack(
    batch: MicroBatch,
    *,
    context_parallel: int,
    context_rank: int,
    sequence_parallel: int,
    device: torch.device,
    packing: bool = True,
    image_layout: ImageLayout | None = None,
) -> PackedStream:
    """Lay `batch` out for one context-parallel rank.

    `sequence_parallel`: the tensor-parallel size if sequence parallel is on, else 1. `image_layout`: of a model that
    reads images. Raises ValueError for images that do not match it.
    """
    if batch.images is not None:
        check_images(batch.images, batch.tokens, batch.lengths, image_layout)
    lengths = torch.tensor(batch.lengths)
    sizes = {"context_parallel": context_parallel, "sequence_parallel": sequence_parallel}
    padded = torch.tensor(padded_lengths(batch.lengths, **sizes, packing=packing))
    cu_seqlens = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    size, total = int(cu_seqlens[-1]), len(batch.tokens)

    # Index of each of the micro batch's tokens in the stream, and within its sequence.
    within = torch.arange(total) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    places = cu_seqlens[:-1].repeat_interleave(lengths) + within
    stream = torch.zeros(size, dtype=torch.int64)
    stream[places] = batch.tokens.cpu()
    row_tokens = torch.full((size,), -1)
    row_tokens[places] = torch.arange(total)
    positions = torch.arange(size) - cu_seqlens[:-1].repeat_interleave(padded)
    if image_layout is not None:
        positions = positions.repeat(3, 1)
        positions[:, places] = batch_positions(batch.images, batch.lengths, image_layout)

    targets, sources, labels = _predictions(batch, stream, places, within)
    cuts = [_share(padded, cu_seqlens, context_parallel, rank) for rank in range(context_parallel)]
    rows = cuts if packing else [cut.view(len(lengths), -1).T.flatten() for cut in cuts]
    candidates = _candidates(batch, sources, targets, size)
    sources = _inverse(torch.cat(rows))[sources]
    stream, positions = (x[..., cuts[context_rank]] for x in (stream, positions))
    labels, row_tokens = (x[rows[context_rank]] for x in (labels, row_tokens))
    return PackedStream(
        packed=packing,
        tokens=stream.to(device),
        positions=positions.to(device),
        labels=labels.to(device),
        candidates=None if candidates is None else candidates[rows[context_rank]],
        sequences=_sequences(batch, row_tokens).to(device),
        lengths=lengths.to(device),
        cu_seqlens=cu_seqlens.to(device, torch.int32),
        offsets=tuple(cu_seqlens.tolist()),
        longest=int(padded.max()),
        sources=sources.to(device),
        targets=targets.to(device),
        total=total,
        row_tokens=row_tokens.to(device),
        routing=batch.routing,
        images=_stream_images(batch, row_tokens, image_layout),
    )


def _predictions(
    batch: MicroBatch, stream: torch.Tensor, places: torch.Tensor, within: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (predicted tokens, stream indices of the logits that predict them, labels of the stream).

    `places` and `within`: index of each token in the stream and within its sequence.
    """
    targets = torch.nonzero(within > 0).squeeze(1)  # every token but the first of a sequence is predicted
    sources = places[targets] - 1  # by the logits one place before it
    labels = torch.zeros_like(stream)
    labels[sources] = stream[sources + 1] if batch.predicted is None else batch.predicted.cpu()[targets]
    return targets, sources, labels


def _candidates(batch: MicroBatch, sources: torch.Tensor, targets: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return candidates of the whole stream [size, K]: each row has the candidates of the token it predicts."""
    if batch.candidates is None:
        return None
    tokens = batch.candidates.tokens
    by_row = tokens.new_zeros(size, tokens.shape[1])
    by_row[sources] = tokens[targets]
    return by_row


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of the permutation `order`."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def _sequences(batch: MicroBatch, row_tokens: torch.Tensor) -> torch.Tensor:
    """Return `PackedStream.sequences` of a rank that holds `row_tokens`."""
    numbers = torch.arange(len(batch.lengths))
    if batch.counted is not None:
        numbers = numbers.where(torch.tensor(batch.counted), -1)
    of_token = numbers.repeat_interleave(torch.tensor(batch.lengths))
    return of_token[row_tokens].where(row_tokens >= 0, -1)


def _stream_images(batch: MicroBatch, row_tokens: torch.Tensor, layout: ImageLayout | None) -> StreamImages | None:
    """Return the images of `batch` for a rank that holds `row_tokens` (see `PackedStream`).

    Every rank runs the vision tower on all images of the micro batch, and uses the rows of its tokens.
    """
    if batch.images is None:
        return None
    assert layout is not None, "check_images comes first"
    image_tokens = batch_places(batch.images, batch.lengths, layout)
    row_of = torch.full((len(batch.tokens) + 1,), -1)  # the last entry is for padding (-1)
    row_of[image_tokens] = torch.arange(len(image_tokens))
    rows = row_of[row_tokens]
    held = torch.nonzero(rows >= 0).squeeze(1)
    return StreamImages(batch.images.pixels, batch.images.grids, rows=rows[held], places=held)


def _share(padded: torch.Tensor, cu_seqlens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return the stream indices that `rank` holds, in its order."""
    if ranks == 1:
        return torch.arange(int(cu_seqlens[-1]))
    chunks = []
    for start, length in zip(cu_seqlens[:-1].tolist(), padded.tolist(), strict=True):
        chunk = length // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            chunks.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(chunks)
