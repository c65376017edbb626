"""Exchange the slice tables of all ranks through the session's store, and verify that all ranks plan from the same tables."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from megarl.weight_sync.session import ShardedSession, WeightSyncError
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.store import StoreChannel


def publish(channel: StoreChannel, key: str, table: SliceTable) -> None:
    """Publish a rank's slice table under `key`. Ranks with equal tables share one copy in the store."""
    blob = f"slices/{table.digest}"
    if not channel.has(blob):
        channel.publish_bytes(blob, table.to_bytes())
    channel.publish(key, table.digest)


def collect(channel: StoreChannel, keys: Sequence[str], awaited: str) -> list[SliceTable]:
    """Wait for the slice tables of all `keys` and return them. `awaited` describes them in error messages."""
    digests = channel.wait(keys, awaited)
    tables = {digest: SliceTable.from_bytes(channel.read_bytes(f"slices/{digest}")) for digest in set(digests)}
    return [tables[digest] for digest in digests]


def held_key(rank: int) -> str:
    """Key of the slices that trainer rank `rank` holds."""
    return f"holds/{rank}"


def needed_key(receiver: str) -> str:
    """Key of the slices that engine rank `receiver` needs."""
    return f"needs/{receiver}"


def check_same_inputs(
    channel: StoreChannel,
    session: ShardedSession,
    held: Sequence[SliceTable],
    needed: Sequence[SliceTable],
    *,
    first: bool,
) -> None:
    """Raise WeightSyncError unless this rank plans from the same inputs as trainer rank 0 (`first`)."""
    digest = hashlib.blake2b(json.dumps(dataclasses.asdict(session)).encode(), digest_size=16)
    for table in (*held, *needed):
        digest.update(table.digest.encode())
    if first:
        channel.publish("plan", digest.hexdigest())
        return
    (expected,) = channel.wait(["plan"], "the plan of the trainers' rank 0")
    if expected != digest.hexdigest():
        raise WeightSyncError(
            "this process and the trainers' rank 0 plan weight sync from different slice tables: is the same megarl "
            "installed on every machine?"
        )
