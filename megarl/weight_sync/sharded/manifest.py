"""Descriptions of all ranks through the session's store, and the proof that everyone plans from the same ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from megarl.weight_sync.session import ShardedSession, WeightSyncError
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.store import StoreChannel


def tell(channel: StoreChannel, who: str, description: SliceTable) -> None:
    """Publish what `who` holds, or needs. What ranks have in common is in the store once."""
    blob = f"description/{description.digest}"
    if not channel.has(blob):
        channel.publish_bytes(blob, description.to_bytes())
    channel.publish(who, description.digest)


def hear(channel: StoreChannel, who: Sequence[str], awaited: str) -> list[SliceTable]:
    """What all of them published, once each has. `awaited` says in errors what they stand for."""
    digests = channel.wait(who, awaited)
    unique = {digest: SliceTable.from_bytes(channel.bytes_of(f"description/{digest}")) for digest in set(digests)}
    return [unique[digest] for digest in digests]


def holder(rank: int) -> str:
    """The name under which trainer rank `rank` tells what it holds."""
    return f"holds/{rank}"


def needing(receiver: str) -> str:
    return f"needs/{receiver}"


def agree(
    channel: StoreChannel,
    session: ShardedSession,
    held: Sequence[SliceTable],
    needed: Sequence[SliceTable],
    *,
    first: bool,
) -> None:
    """Raise WeightSyncError unless this rank plans from what trainer rank 0 (`first`) plans from."""
    own = hashlib.blake2b(json.dumps(dataclasses.asdict(session)).encode(), digest_size=16)
    for description in (*held, *needed):
        own.update(description.digest.encode())
    if first:
        channel.publish("plan", own.hexdigest())
        return
    (theirs,) = channel.wait(["plan"], "the plan of the trainers' rank 0")
    if theirs != own.hexdigest():
        raise WeightSyncError(
            "this process and the trainers' rank 0 plan the weight exchange from different descriptions: is the same "
            "megarl installed on every machine?"
        )
