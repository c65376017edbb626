"""How many bytes of a plan go where: for people, and for estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megarl.weight_sync.sharded.intersect import ITEM_SIZES
from megarl.weight_sync.sharded.plan import TransferPlan


@dataclass(frozen=True)
class Flow:
    """What trainer ranks of one kind send. Bytes."""

    source: str  # the kind
    what: str  # "experts" or "others"
    audience: tuple[int, int]  # fewest and most engine ranks of a stream: but for the first, each has it from another
    tensors: int
    senders: int  # trainer ranks
    sent: int  # by trainers, in all
    sent_by_rank: int  # by the one that sends the most
    received_by_rank: int  # by the engine rank that receives the most
    relayed: int  # from engine rank to engine rank, in all
    between_hosts: int
    buckets: int  # with any of it: one with experts and others is in the flows of both


@dataclass(frozen=True)
class Totals:
    """Of a whole update. Bytes."""

    sent: int  # by trainers, in all
    sent_by_rank: int
    received: int  # by engines, in all
    received_by_rank: int
    relayed_by_rank: int
    between_hosts: int
    streams: int
    buckets: int


def totals(made: TransferPlan) -> Totals:
    nbytes = made.nbytes
    sent = np.bincount(made.sources, nbytes, len(made.hosts.trainers))
    received, relayed = np.zeros(len(made.hosts.engines)), np.zeros(len(made.hosts.engines))
    for size, ranks in zip(nbytes.tolist(), made.targets, strict=True):
        received[list(ranks)] += size
        relayed[list(ranks[:-1])] += size
    return Totals(
        sent=int(sent.sum()),
        sent_by_rank=int(sent.max()),
        received=int(received.sum()),
        received_by_rank=int(received.max()),
        relayed_by_rank=int(relayed.max()),
        between_hosts=int((nbytes * _hops_between_hosts(made)).sum()),
        streams=len(nbytes),
        buckets=sum(len(made.bucket_starts(number)) - 1 for number in range(len(nbytes))),
    )


def flows(made: TransferPlan, kinds: Sequence[str]) -> list[Flow]:
    """By kind of trainer rank (`kinds`, in the order of ranks), of experts and of other weights."""
    names = list(dict.fromkeys(kinds))
    kind = np.array([names.index(name) for name in kinds], np.int64)[made.sources]
    stream = np.repeat(np.arange(len(made.targets)), np.diff(made.starts))
    expert = np.array([".experts." in name for name in made.names])[made.needed.slices[made.pieces[:, 0], 0]]
    groups, group = np.unique(2 * kind[stream] + expert, return_inverse=True)
    bucket = _buckets(made)
    between = _hops_between_hosts(made)
    return [
        _flow(made, names[code // 2], bool(code % 2), stream, bucket, group == number, between)
        for number, code in enumerate(groups.tolist())
    ]


def _flow(
    made: TransferPlan,
    source: str,
    experts: bool,
    stream: np.ndarray,
    bucket: np.ndarray,
    own: np.ndarray,
    between: np.ndarray,
) -> Flow:
    """Of the pieces `own`; `stream` and `bucket`: of all pieces."""
    nbytes = made.pieces[own, 4] * made.pieces[own, 5] * ITEM_SIZES[made.dtypes[stream[own]]]
    of_stream = np.bincount(stream[own], nbytes, len(made.targets)).astype(np.int64)
    audience = np.array([len(ranks) for ranks in made.targets])
    sent = np.bincount(made.sources, of_stream)
    received = np.zeros(len(made.hosts.engines), np.int64)
    used = np.flatnonzero(of_stream)
    for number in used.tolist():
        received[list(made.targets[number])] += of_stream[number]
    return Flow(
        source=source,
        what="experts" if experts else "others",
        audience=(int(audience[used].min()), int(audience[used].max())),
        tensors=len(np.unique(made.needed.slices[made.pieces[own, 0], 0])),
        senders=int((sent > 0).sum()),
        sent=int(sent.sum()),
        sent_by_rank=int(sent.max()),
        received_by_rank=int(received.max()),
        relayed=int((of_stream * (audience - 1)).sum()),
        between_hosts=int((of_stream * between).sum()),
        buckets=len(np.unique(bucket[own])),
    )


def _buckets(made: TransferPlan) -> np.ndarray:
    """The bucket of each piece, counted over all streams."""
    sizes = [np.diff(made.bucket_starts(number)) for number in range(len(made.targets))]
    return np.repeat(np.arange(sum(map(len, sizes))), np.concatenate(sizes))


def _hops_between_hosts(made: TransferPlan) -> np.ndarray:
    """Of each stream: how often its buckets go from a host to another."""
    trainers, engines = made.hosts.trainers, made.hosts.engines
    found = []
    for source, ranks in zip(made.sources.tolist(), made.targets, strict=True):
        way = [trainers[source], *(engines[rank] for rank in ranks)]
        found.append(sum(a != b for a, b in pairwise(way)))
    return np.array(found, np.int64)
