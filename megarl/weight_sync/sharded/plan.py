"""Who sends which boxes to whom: what a plan of a weight exchange is made of.

A stream carries boxes that the same engine ranks need, in the same type, out of one trainer rank: to the first of them,
which passes each bucket on to the second as it came, and so on. So a trainer sends a box once, however many engines need it.
Engine ranks pass on to ranks of higher number alone, or of a later host: no two can wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.weight_sync.sharded.intersect import DTYPES, ITEM_SIZES, PIECE, Side, expand, gather, match, split
from megarl.weight_sync.sharded.senders import assign, chains, order_of
from megarl.weight_sync.sharded.slices import SliceTable

# Columns of `Stream.copies`: the bucket, the element in it at which the box begins (row after row, without gaps), and
# where the box lies in this end's parameter: element (i, j) is `offset + i * stride + j` of its memory.
COPY = ("bucket", "at", "parameter", "offset", "stride", "rows", "columns")


@dataclass(frozen=True, eq=False)
class Stream:
    """As one of its ranks has to know it. The bytes of its buckets are the same at every rank; `copies` are its own."""

    number: int  # in the whole plan: tells the streams between two ranks apart
    source: int  # trainer rank
    targets: tuple[int, ...]  # engine ranks, each of which passes buckets on to the next
    dtype: str  # of what travels, by torch's name
    buckets: np.ndarray  # int64 [k]: elements of each
    copies: np.ndarray  # int64 [n, 7], columns as in COPY, in the order of their buckets
    tensors: np.ndarray  # int64 [n]: of which tensor of the checkpoint each copy is (numbers of the rank's description)


@dataclass(frozen=True)
class Hosts:
    """On which host each rank is; names that tell hosts apart, such as `session.host_id()`."""

    trainers: Sequence[str]
    engines: Sequence[str]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Of all ranks. The same descriptions in the same order give the same plan, on whatever rank it is made."""

    names: tuple[str, ...]  # of the tensors
    held: Side
    needed: Side
    bucket_bytes: int
    hosts: Hosts
    pieces: np.ndarray  # int64 [n, 6], columns as in PIECE, in the order in which each stream carries them
    starts: np.ndarray  # int64 [streams + 1]: stream k carries pieces[starts[k]:starts[k + 1]]
    sources: np.ndarray  # int64 [streams]
    dtypes: np.ndarray  # int64 [streams], numbers in DTYPES
    targets: tuple[tuple[int, ...], ...]  # of each stream

    def streams_from(self, trainer: int) -> tuple[Stream, ...]:
        return self._part(self.held, trainer, np.flatnonzero(self.sources == trainer), "have")

    def streams_to(self, engine: int) -> tuple[Stream, ...]:
        streams = [number for number, ranks in enumerate(self.targets) if engine in ranks]
        return self._part(self.needed, engine, np.array(streams, np.int64), "need")

    @cached_property
    def nbytes(self) -> np.ndarray:
        """int64 [streams]: what each carries to each of its targets."""
        sizes = np.append(0, np.cumsum(self.pieces[:, 4] * self.pieces[:, 5]))
        return np.diff(sizes[self.starts]) * ITEM_SIZES[self.dtypes]

    def buckets(self, stream: int) -> np.ndarray:
        """Where the buckets of a stream begin among its pieces, and their number at the end."""
        pieces = self.pieces[self.starts[stream] : self.starts[stream + 1]]
        ends = np.cumsum(pieces[:, 4] * pieces[:, 5])
        limit = max(self.bucket_bytes // int(ITEM_SIZES[self.dtypes[stream]]), 1)
        starts, filled = [0], 0
        while starts[-1] < len(pieces):
            stop = max(int(np.searchsorted(ends, filled + limit, "right")), starts[-1] + 1)
            filled = int(ends[stop - 1])
            starts.append(stop)
        return np.array(starts, np.int64)

    def _part(self, side: Side, rank: int, streams: np.ndarray, what: str) -> tuple[Stream, ...]:
        """Boxes of the plan, where they lie in the parameters of `rank`; once more for each place that takes the same box."""
        boxes, rows = side.local(rank)
        description = side.tables[side.class_of[rank]]
        made = []
        for number in streams.tolist():
            pieces = self.pieces[self.starts[number] : self.starts[number + 1]]
            wanted = pieces[:, PIECE.index(what)]
            low = np.searchsorted(boxes, wanted, "left")
            # A trainer that holds a box in two places (tied embeddings) sends one; an engine fills all.
            counts = np.ones_like(low) if what == "have" else np.searchsorted(boxes, wanted, "right") - low
            piece, place = expand(counts)
            own = description.slices[rows[low[piece] + place]]
            starts = self.buckets(number)
            sizes = pieces[:, 4] * pieces[:, 5]
            begin = np.append(0, np.cumsum(sizes))
            bucket = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            at = begin[:-1] - begin[starts[bucket]]
            part = pieces[piece]
            offset = own[:, 6] + (part[:, 2] - own[:, 1]) * own[:, 7] + part[:, 3] - own[:, 2]
            copies = np.column_stack([bucket[piece], at[piece], own[:, 5], offset, own[:, 7], part[:, 4:6]])
            made.append(
                Stream(
                    number,
                    int(self.sources[number]),
                    self.targets[number],
                    DTYPES[self.dtypes[number]],
                    np.diff(begin[starts]),
                    copies,
                    own[:, 0],
                )
            )
        return tuple(made)


def plan_transfers(
    haves: Sequence[SliceTable], needs: Sequence[SliceTable], hosts: Hosts, bucket_bytes: int
) -> TransferPlan:
    """Who sends what to whom, of what trainer ranks hold (`haves`) and engine ranks need, in the order of ranks.

    ValueError, with the tensor and the ranks, where a needed element is held by nobody, where trainers hold boxes that overlap without
    being the same, and where the two sides do not mean the same tensor by a name.
    """
    names = _names(haves, needs)
    numbers = {name: number for number, name in enumerate(names)}
    needed, held = gather("engine", needs, numbers), gather("trainer", haves, numbers)
    pieces = match(needed, held, names)
    wire = _wire(held.slices[pieces[:, 1], 5], needed.slices[pieces[:, 0], 5])
    pieces = split(pieces, ITEM_SIZES[wire], bucket_bytes)
    wire = _wire(held.slices[pieces[:, 1], 5], needed.slices[pieces[:, 0], 5])

    piece, choice, chain, candidates, routes = _routes(
        needed.group[pieces[:, 0]], held.group[pieces[:, 1]], needed, held, hosts
    )
    pieces, wire = pieces[piece], wire[piece]
    order = np.lexsort((piece, chain))  # runs of a chain stay together
    sender = np.empty(len(piece), np.int64)
    nbytes = pieces[:, 4] * pieces[:, 5] * ITEM_SIZES[wire]
    sender[order] = assign(candidates, choice[order], nbytes[order], len(haves))

    order = np.lexsort((piece, wire, chain, sender))
    keys = np.column_stack([sender, chain, wire])[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]).any(1)
    begins = np.flatnonzero(first)
    return TransferPlan(
        names,
        held,
        needed,
        bucket_bytes,
        hosts,
        pieces[order],
        np.append(begins, len(keys)),
        keys[begins, 0],
        keys[begins, 2],
        tuple(routes[number] for number in keys[begins, 1].tolist()),
    )


def _names(haves: Sequence[SliceTable], needs: Sequence[SliceTable]) -> tuple[str, ...]:
    """Of all tensors, as engines need them: streams follow this order, and engines finish a layer after the other."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for ranks, descriptions in (("engine", needs), ("trainer", haves)):
        for rank, one in {id(one): (rank, one) for rank, one in reversed(list(enumerate(descriptions)))}.values():
            for name, shape in zip(one.tensors, one.shapes, strict=True):
                known, who = shapes.setdefault(name, (shape, f"{ranks} rank {rank}"))
                if known != shape:
                    raise ValueError(f"{name} is {list(known)} at {who}, and {list(shape)} at {ranks} rank {rank}")
    return tuple(shapes)


def _wire(held: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """The type in which each travels: the smaller one. What the engine's loader would round, the trainer rounds."""
    return np.where(ITEM_SIZES[needed] <= ITEM_SIZES[held], needed, held)


def _routes(
    audience: np.ndarray, holder: np.ndarray, needs: Side, haves: Side, hosts: Hosts
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of each piece once for each of its chains: its number, and the numbers of who may send it and of the chain; then
    what these two numbers mean."""
    place = order_of(hosts.engines)
    by_host: dict[str, set[int]] = {}
    for rank, host in enumerate(hosts.trainers):
        by_host.setdefault(host, set()).add(rank)
    pairs, pair = np.unique(audience * len(haves.groups) + holder, return_inverse=True)
    candidates: dict[tuple[int, ...], int] = {}
    routes: dict[tuple[int, ...], int] = {}
    numbers, counts = [], []
    for code in pairs.tolist():
        group, held = divmod(code, len(haves.groups))
        found = chains(needs.groups[group], haves.groups[held], place, hosts.engines, by_host)
        counts.append(len(found))
        for feeders, chain in found:
            numbers.append((candidates.setdefault(feeders, len(candidates)), routes.setdefault(chain, len(routes))))
    count = np.array(counts, np.int64)
    piece, which = expand(count[pair])
    at = (np.cumsum(count) - count)[pair[piece]] + which
    table = np.array(numbers, np.int64).reshape(-1, 2)
    return piece, table[at, 0], table[at, 1], list(candidates), list(routes)
