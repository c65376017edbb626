"""Plan who sends which slices to which engine ranks.

A stream carries slices that the same engine ranks need, in the same dtype, from one trainer rank: to the first of these
ranks, which passes each bucket on to the second unchanged, and so on. A trainer sends a slice once per chain of engine
ranks: there is one chain for each host that has engines and a holder of the slice, and one more if the first engine host
has no holder. Engine ranks pass buckets on only to higher ranks or to later hosts, so no two of them can wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.weight_sync.sharded.chains import assign, chain_order, chains
from megarl.weight_sync.sharded.intersect import (
    DTYPES,
    ITEM_SIZES,
    PIECE_COLUMNS,
    SLICE_KEY,
    SliceIndex,
    elements,
    expand,
    index_slices,
    intersect,
    split_pieces,
)
from megarl.weight_sync.sharded.slices import SliceTable

# Columns of `Stream.copies`: the bucket, the slice's first element in it (rows follow each other without gaps), and the
# slice's location in the rank's parameter: element (i, j) is `offset + i * stride + j` of its memory.
COPY_COLUMNS = ("bucket", "at", "parameter", "offset", "stride", "rows", "columns")


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream as one rank sees it. All its ranks see the same bytes in its buckets; `copies` differ."""

    number: int  # in the whole plan: distinguishes the streams between two ranks
    source: int  # trainer rank
    targets: tuple[int, ...]  # engine ranks, each of which passes buckets on to the next
    dtype: str  # of the buckets, by torch's name
    bucket_elements: np.ndarray  # int64 [buckets]
    copies: np.ndarray  # int64 [n, 7], columns as in COPY_COLUMNS, in the order of their buckets
    tensors: np.ndarray  # int64 [n]: checkpoint tensor of each copy, by its number in the rank's slice table


@dataclass(frozen=True)
class Hosts:
    """The host of each rank, by any names that distinguish hosts, such as `session.host_id()`."""

    trainers: Sequence[str]
    engines: Sequence[str]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """All streams of an update. Equal slice tables in equal order give the same plan on every rank."""

    names: tuple[str, ...]  # of the tensors
    held: SliceIndex
    needed: SliceIndex
    bucket_bytes: int
    hosts: Hosts
    pieces: np.ndarray  # int64 [n, 6], columns as in PIECE_COLUMNS, in the order that streams carry them
    starts: np.ndarray  # int64 [streams + 1]: stream k carries pieces[starts[k]:starts[k + 1]]
    sources: np.ndarray  # int64 [streams]: trainer rank of each
    dtypes: np.ndarray  # int64 [streams], numbers in DTYPES
    targets: tuple[tuple[int, ...], ...]  # engine ranks of each stream

    def streams_from(self, trainer: int) -> tuple[Stream, ...]:
        """Return the streams that trainer rank `trainer` sends."""
        # A trainer that holds a slice in two places (tied embeddings) sends one.
        return self._streams(self.held, trainer, np.flatnonzero(self.sources == trainer).tolist(), "have", 1)

    def streams_to(self, engine: int) -> tuple[Stream, ...]:
        """Return the streams that engine rank `engine` receives."""
        streams = [number for number, ranks in enumerate(self.targets) if engine in ranks]
        return self._streams(self.needed, engine, streams, "need", None)  # an engine fills all places of a slice

    @cached_property
    def stream_bytes(self) -> np.ndarray:
        """int64 [streams]: bytes that each stream carries to each of its targets."""
        sizes = np.append(0, np.cumsum(elements(self.pieces)))
        return np.diff(sizes[self.starts]) * ITEM_SIZES[self.dtypes]

    def bucket_starts(self, stream: int) -> np.ndarray:
        """Return the first piece of each bucket, counted from the stream's first; then the stream's number of pieces."""
        pieces = self.pieces[self.starts[stream] : self.starts[stream + 1]]
        ends = np.cumsum(elements(pieces))
        limit = max(self.bucket_bytes // int(ITEM_SIZES[self.dtypes[stream]]), 1)
        starts, filled = [0], 0
        while starts[-1] < len(pieces):
            stop = int(np.searchsorted(ends, filled + limit, "right"))
            assert stop > starts[-1], "split_pieces leaves no piece larger than a bucket"
            filled = int(ends[stop - 1])
            starts.append(stop)
        return np.array(starts, np.int64)

    def _streams(
        self, index: SliceIndex, rank: int, streams: Sequence[int], side: str, most_places: int | None
    ) -> tuple[Stream, ...]:
        """Locate the pieces of `streams` in the parameters of `rank`.

        side: "need" or "have", the column of the rank's slices in PIECE_COLUMNS. most_places: of one slice in the rank's
        parameters that the streams use; None: all.
        """
        numbers, rows = index.of_rank(rank)
        table = index.tables[index.class_of[rank]]
        result = []
        for number in streams:
            pieces = self.pieces[self.starts[number] : self.starts[number + 1]]
            slices = pieces[:, PIECE_COLUMNS.index(side)]
            low = np.searchsorted(numbers, slices, "left")
            places = np.searchsorted(numbers, slices, "right") - low
            piece, position = expand(places if most_places is None else np.minimum(places, most_places))
            local = table.slices[rows[low[piece] + position]]
            tensor, first_row, first_column, _, _, parameter, offset, stride = local.T
            starts = self.bucket_starts(number)
            begin = np.append(0, np.cumsum(elements(pieces)))
            bucket = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            at = begin[:-1] - begin[starts[bucket]]
            _, _, row, column, height, width = pieces[piece].T
            offset = offset + (row - first_row) * stride + column - first_column
            copies = np.column_stack([bucket[piece], at[piece], parameter, offset, stride, height, width])
            result.append(
                Stream(
                    number=number,
                    source=int(self.sources[number]),
                    targets=self.targets[number],
                    dtype=DTYPES[self.dtypes[number]],
                    bucket_elements=np.diff(begin[starts]),
                    copies=copies,
                    tensors=tensor,
                )
            )
        return tuple(result)


def plan_transfers(
    held: Sequence[SliceTable], needed: Sequence[SliceTable], hosts: Hosts, bucket_bytes: int
) -> TransferPlan:
    """Plan an update from the slices that trainer ranks hold and engine ranks need, in the order of ranks.

    Raises ValueError, with the tensor and the ranks, if no trainer holds a needed element, if trainers hold slices that
    overlap without being equal, if a tensor has different shapes, or if a parameter's dtype is not in `DTYPES`.
    """
    names = _checked_names(held, needed)
    numbers = {name: number for number, name in enumerate(names)}
    needed_index, held_index = index_slices("engine", needed, numbers), index_slices("trainer", held, numbers)
    pieces = intersect(needed_index, held_index, names)
    needed_slice, held_slice = pieces[:, PIECE_COLUMNS.index("need")], pieces[:, PIECE_COLUMNS.index("have")]
    column = SLICE_KEY.index("dtype")
    dtype = _transfer_dtype(held_index.slices[held_slice, column], needed_index.slices[needed_slice, column])
    pieces, origin = split_pieces(pieces, ITEM_SIZES[dtype], bucket_bytes)
    dtype = dtype[origin]

    audience, holder = needed_index.group[needed_slice[origin]], held_index.group[held_slice[origin]]
    piece, choice, chain, candidates, routes = _routes(audience, holder, needed_index, held_index, hosts)
    pieces, dtype = pieces[piece], dtype[piece]
    # `assign` gives neighbouring items to one sender. Sorted by chain, a chain is split over few senders: few streams.
    order = np.lexsort((piece, chain))
    sender = np.empty(len(piece), np.int64)
    piece_bytes = elements(pieces) * ITEM_SIZES[dtype]
    sender[order] = assign(candidates, choice[order], piece_bytes[order], len(held))

    order = np.lexsort((piece, dtype, chain, sender))
    keys = np.column_stack([sender, chain, dtype])[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]).any(1)
    begins = np.flatnonzero(first)
    senders, chain_numbers, dtypes = keys[begins].T
    return TransferPlan(
        names=names,
        held=held_index,
        needed=needed_index,
        bucket_bytes=bucket_bytes,
        hosts=hosts,
        pieces=pieces[order],
        starts=np.append(begins, len(keys)),
        sources=senders,
        dtypes=dtypes,
        targets=tuple(routes[number] for number in chain_numbers.tolist()),
    )


def _checked_names(held: Sequence[SliceTable], needed: Sequence[SliceTable]) -> tuple[str, ...]:
    """Return all tensor names in the engines' order. Streams follow it, so engines complete one layer after the other.

    Raises ValueError if two ranks have a tensor in different shapes.
    """
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for ranks, tables in (("engine", needed), ("trainer", held)):
        first_of: dict[int, tuple[int, SliceTable]] = {}  # by table: ranks with equal tables share one
        for rank, table in enumerate(tables):
            first_of.setdefault(id(table), (rank, table))
        for rank, table in first_of.values():
            for name, shape in zip(table.tensors, table.shapes, strict=True):
                first_shape, first_rank = shapes.setdefault(name, (shape, f"{ranks} rank {rank}"))
                if first_shape != shape:
                    raise ValueError(
                        f"{name} has shape {list(first_shape)} at {first_rank}, but {list(shape)} at {ranks} rank {rank}: do "
                        "both load the same model?"
                    )
    return tuple(shapes)


def _transfer_dtype(held: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return the smaller of the two dtypes, the engine's if both are equally large.

    So the trainer rounds values that the engine's loader would round.
    """
    return np.where(ITEM_SIZES[needed] <= ITEM_SIZES[held], needed, held)


def _routes(
    audience: np.ndarray, holder: np.ndarray, needed: SliceIndex, held: SliceIndex, hosts: Hosts
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Repeat each piece for each chain that carries it.

    `audience`, `holder`: group of engine ranks and group of trainer ranks of each piece. Returns, per repetition, the
    number of the piece, of its candidate senders and of its chain; then all candidates and all chains.
    """
    position = chain_order(hosts.engines)
    by_host: dict[str, set[int]] = {}
    for rank, host in enumerate(hosts.trainers):
        by_host.setdefault(host, set()).add(rank)
    pairs, pair = np.unique(audience * len(held.groups) + holder, return_inverse=True)
    candidates: dict[tuple[int, ...], int] = {}
    routes: dict[tuple[int, ...], int] = {}
    numbers, counts = [], []
    for code in pairs.tolist():
        readers, holders = divmod(code, len(held.groups))
        pair_chains = chains(needed.groups[readers], held.groups[holders], position, hosts.engines, by_host)
        counts.append(len(pair_chains))
        for senders, chain in pair_chains:
            numbers.append((candidates.setdefault(senders, len(candidates)), routes.setdefault(chain, len(routes))))
    count = np.array(counts, np.int64)
    piece, which = expand(count[pair])
    at = (np.cumsum(count) - count)[pair[piece]] + which
    table = np.array(numbers, np.int64).reshape(-1, 2)
    return piece, table[at, 0], table[at, 1], list(candidates), list(routes)
