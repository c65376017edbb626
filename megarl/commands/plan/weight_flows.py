"""Bytes of a sharded weight sync by sender and receiver, for tables and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megarl.weight_sync.sharded.intersect import ITEM_SIZES, elements
from megarl.weight_sync.sharded.plan import TransferPlan


@dataclass(frozen=True)
class Flow:
    """Bytes that trainer ranks of one kind send."""

    source: str  # kind of trainer rank
    weights: str  # "experts" or "others"
    audience: tuple[int, int]  # fewest and most engine ranks of a stream; all but the first receive it from another one
    tensors: int
    senders: int  # trainer ranks
    sent: int  # by all trainers
    sent_by_rank: int  # by the trainer rank that sends most
    received_by_rank: int  # by the engine rank that receives most
    relayed: int  # between engine ranks
    between_hosts: int
    buckets: int  # buckets with data of this flow; a bucket with experts and others counts in both flows


@dataclass(frozen=True)
class Totals:
    """Bytes of a whole update."""

    sent: int  # by all trainers
    sent_by_rank: int
    received: int  # by all engines
    received_by_rank: int
    relayed_by_rank: int
    between_hosts: int
    streams: int
    buckets: int


def totals(plan: TransferPlan) -> Totals:
    stream_bytes = plan.stream_bytes
    sent = np.bincount(plan.sources, stream_bytes, len(plan.hosts.trainers))
    received, relayed = np.zeros(len(plan.hosts.engines)), np.zeros(len(plan.hosts.engines))
    for size, ranks in zip(stream_bytes.tolist(), plan.targets, strict=True):
        received[list(ranks)] += size
        relayed[list(ranks[:-1])] += size
    return Totals(
        sent=int(sent.sum()),
        sent_by_rank=int(sent.max()),
        received=int(received.sum()),
        received_by_rank=int(received.max()),
        relayed_by_rank=int(relayed.max()),
        between_hosts=int((stream_bytes * _host_crossings(plan)).sum()),
        streams=len(stream_bytes),
        buckets=sum(len(plan.bucket_starts(number)) - 1 for number in range(len(stream_bytes))),
    )


def flows(plan: TransferPlan, kinds: Sequence[str]) -> list[Flow]:
    """Return flows by kind of trainer rank (`kinds`, in rank order), for experts and for other weights."""
    names = list(dict.fromkeys(kinds))
    kind = np.array([names.index(name) for name in kinds], np.int64)[plan.sources]
    stream = np.repeat(np.arange(len(plan.targets)), np.diff(plan.starts))
    expert = np.array([".experts." in name for name in plan.names])[plan.needed.slices[plan.pieces[:, 0], 0]]
    groups, group = np.unique(2 * kind[stream] + expert, return_inverse=True)
    bucket = _buckets(plan)
    between = _host_crossings(plan)
    return [
        _flow(plan, names[code // 2], bool(code % 2), stream, bucket, group == number, between)
        for number, code in enumerate(groups.tolist())
    ]


def _flow(
    plan: TransferPlan,
    source: str,
    experts: bool,
    stream: np.ndarray,
    bucket: np.ndarray,
    selected: np.ndarray,
    between: np.ndarray,
) -> Flow:
    """Sum the `selected` pieces; `stream` and `bucket`: of all pieces."""
    piece_bytes = elements(plan.pieces[selected]) * ITEM_SIZES[plan.dtypes[stream[selected]]]
    of_stream = np.bincount(stream[selected], piece_bytes, len(plan.targets)).astype(np.int64)
    audience = np.array([len(ranks) for ranks in plan.targets])
    sent = np.bincount(plan.sources, of_stream)
    received = np.zeros(len(plan.hosts.engines), np.int64)
    used = np.flatnonzero(of_stream)
    for number in used.tolist():
        received[list(plan.targets[number])] += of_stream[number]
    return Flow(
        source=source,
        weights="experts" if experts else "others",
        audience=(int(audience[used].min()), int(audience[used].max())),
        tensors=len(np.unique(plan.needed.slices[plan.pieces[selected, 0], 0])),
        senders=int((sent > 0).sum()),
        sent=int(sent.sum()),
        sent_by_rank=int(sent.max()),
        received_by_rank=int(received.max()),
        relayed=int((of_stream * (audience - 1)).sum()),
        between_hosts=int((of_stream * between).sum()),
        buckets=len(np.unique(bucket[selected])),
    )


def _buckets(plan: TransferPlan) -> np.ndarray:
    """Return the bucket of each piece, numbered over all streams."""
    sizes = [np.diff(plan.bucket_starts(number)) for number in range(len(plan.targets))]
    return np.repeat(np.arange(sum(map(len, sizes))), np.concatenate(sizes))


def _host_crossings(plan: TransferPlan) -> np.ndarray:
    """Return for each stream how often its buckets travel between hosts."""
    trainers, engines = plan.hosts.trainers, plan.hosts.engines
    counts = []
    for source, ranks in zip(plan.sources.tolist(), plan.targets, strict=True):
        hosts = [trainers[source], *(engines[rank] for rank in ranks)]
        counts.append(sum(a != b for a, b in pairwise(hosts)))
    return np.array(counts, np.int64)
