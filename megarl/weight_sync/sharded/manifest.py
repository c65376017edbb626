"""Exchange the slice tables of all ranks through the session's store, and make the same plan from them on every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from megarl.weight_sync.session import Session, WeightSyncError
from megarl.weight_sync.sharded.plan import Hosts, TransferPlan, plan_transfers
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


def plan_update(
    channel: StoreChannel, session: Session, held: Sequence[SliceTable], *, first: bool
) -> tuple[TransferPlan, list[SliceTable]]:
    """Wait for the engines' slice tables and plan the updates of a session. Returns the plan and these tables.

    `held`: the trainers' slice tables. `first`: this is trainer rank 0. Raises WeightSyncError unless this rank plans from
    the same inputs as trainer rank 0, and ValueError if no plan exists (see `plan_transfers`).
    """
    needed = collect(channel, [needed_key(name) for name in session.names], "the engines' slice tables")
    _check_same_inputs(channel, session, [*held, *needed], first=first)
    hosts = Hosts(session.senders, [host for _, host in session.receivers])
    return plan_transfers(held, needed, hosts, session.bucket_bytes), needed


def _check_same_inputs(channel: StoreChannel, session: Session, tables: Sequence[SliceTable], *, first: bool) -> None:
    digest = hashlib.blake2b(json.dumps(dataclasses.asdict(session)).encode(), digest_size=16)
    for table in tables:
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
