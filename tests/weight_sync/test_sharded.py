"""Sharded weight sync: every slice arrives once with a verified fingerprint, or every rank raises the cause."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megarl.weight_sync.fingerprint import Fingerprinter, fingerprint
from megarl.weight_sync.relay import Relay, max_connections, relay_path, stream_relays
from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import (
    Session,
    WeightSyncError,
    compare_reports,
    host_id,
)
from megarl.weight_sync.sharded import receiver as planned_receiver
from megarl.weight_sync.sharded import verify
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.plan import Hosts, Stream
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.sharded.slices import SliceTableBuilder
from megarl.weight_sync.store import StoreChannel
from tests.support.sharded_ranks import SHAPES, ShardedCluster, open_cluster, replaced

HERE = ["here"] * 4
RELAYED = ["here", "b", "b", "c"]
APART = ["b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("places", "transport"),
    [(HERE, "auto"), (RELAYED, "auto"), (APART, "auto"), (HERE, "collective"), (HERE, "device")],
)
def test_every_element_arrives_once_and_is_verified(tmp_path, places, transport):
    with open_cluster(tmp_path, places, transport=transport) as cluster:
        assert Session.from_json(cluster.session.to_json()) == cluster.session
        cluster.connect()
        needed = sum(rank.description.nbytes for rank in cluster.engines)
        for version in (3, 4, 5):
            sent, received = cluster.update(version)
            assert received.bytes == needed
            assert received.buckets > 8
            assert sent.version == received.version == version
            assert os.listdir(tmp_path) == []
        assert cluster.exports == 4, "only the first version is checked against the export, by every trainer rank"
        once = {key.split(" to ")[0] for key in sent.streams}
        assert len(once) < len(sent.streams), "replicas read the buckets of the first"
        with pytest.raises(WeightSyncError, match=r"1 streams differ: 0 to e0/0: sent x, received"):
            compare_reports(replaced(sent, streams=sent.streams | {"0 to e0/0": "x"}), received)


@pytest.mark.parametrize(("places", "transport"), [(HERE, "auto"), (APART, "auto"), (HERE, "device")])
def test_buckets_do_not_depend_on_torchs_default_device(tmp_path, monkeypatch, places, transport):
    """vLLM sets its device as torch's default around a receiver; gloo and fingerprints read host memory."""
    begin, receive = ShardedReceiver.begin, ShardedReceiver.receive

    def elsewhere(method):
        def called(*arguments):
            with torch.device("meta"):
                return method(*arguments)

        return called

    monkeypatch.setattr(ShardedReceiver, "begin", elsewhere(begin))
    monkeypatch.setattr(ShardedReceiver, "receive", elsewhere(receive))
    with open_cluster(tmp_path, places, transport=transport) as cluster:
        cluster.connect()
        for version in (1, 2):
            cluster.update(version)


@pytest.mark.parametrize("places", [RELAYED, APART])
def test_each_bucket_is_fingerprinted_once_per_end(tmp_path, monkeypatch, places):
    """Holds for a relay, too: it verifies a bucket before it sends it on."""
    counts: Counter[str] = Counter()

    def counted(name):
        method = getattr(Fingerprinter, name)

        def count(self, memory):
            counts[name] += 1
            return method(self, memory)

        return count

    with open_cluster(tmp_path, places) as cluster:
        cluster.connect()
        cluster.update(1)
        for name in ("streaming", "start"):
            monkeypatch.setattr(Fingerprinter, name, counted(name))
        sent, received = cluster.update(2)
        assert counts["start"] > 0 and sum(counts.values()) == sent.buckets + received.buckets


def test_rows_longer_than_a_chunk_are_split(monkeypatch):
    from megarl.weight_sync.sharded import copy

    monkeypatch.setattr(copy, "CHUNK_BYTES", 40)
    held, bucket = torch.arange(60.0), torch.zeros(55)
    copies = [[0, 0, 0, 25, 2, 25], [50, 0, 51, 0, 1, 5]]  # rows of 25 elements, and a short one
    ends = []
    for end, part, piece in StreamCopier._chunks(bucket, copies, lambda _: held):
        assert part.shape == piece.shape and part.nbytes <= 40
        part.copy_(piece)
        ends.append(end)
    assert torch.equal(bucket, torch.cat([held[:50], held[51:56]]))
    assert ends == [40, 80, 100, 140, 180, 200, 220]


@pytest.mark.parametrize("places", [HERE, RELAYED])
def test_each_bucket_needs_few_store_requests_and_no_new_key(tmp_path, monkeypatch, places):
    """Store requests per bucket and reader: one number, one notice, one acknowledgement, and their two reads."""
    counts: Counter[str] = Counter()
    call = StoreChannel._call

    def counted(self, operation, *arguments):
        counts[operation.__name__] += 1
        return call(self, operation, *arguments)

    with open_cluster(tmp_path, places) as cluster:
        cluster.connect()
        cluster.update(1)  # the first update also checks against the export
        cluster.update(2)
        keys = cluster.store.num_keys()
        monkeypatch.setattr(StoreChannel, "_call", counted)
        received = cluster.update(3)[1]
        assert cluster.store.num_keys() == keys, "keys of read buckets are overwritten"
        assert counts["add"] == received.buckets
        assert counts["set"] == 2 * received.buckets + 4, "notes, answers, and that each of four ranks has loaded it"
        assert counts["delete_key"] == 4, "that they had loaded the version before"


def test_relays_and_connections_of_a_stream(tmp_path):
    session, _ = start_session(
        "127.0.0.1", ["a", "a"], [("0", "a"), ("1", "a"), ("2", "b"), ("3", "b"), ("4", "c")],
        transport="auto", sharded=True, bucket_bytes=1, timeout=1.0, check_every=0, heartbeat_timeout=8, shm_dir=str(tmp_path),
    )  # fmt: skip
    stream = Stream(7, 1, (0, 1, 2, 3, 4), "float32", *[torch.zeros(0).numpy()] * 3)
    assert stream_relays(stream, session) == [
        Relay(("trainer", 1), (0, 1), 2),
        Relay(("engine", 2), (3,), 4),
    ]
    hosts = Hosts(("a", "a"), ("a", "a", "b", "b", "c"))
    assert [relay.remote for relay in relay_path(1, stream.targets, hosts, shares_memory=False)] == [0, 1, 2, 3, 4]
    plan = SimpleNamespace(sources=torch.tensor([1, 0]).numpy(), targets=[stream.targets, (0, 3)], hosts=hosts)
    assert max_connections(plan, shares_memory=True) == 2, "engine 2: from trainer 1, and to engine 4"
    assert max_connections(plan, shares_memory=False) == 4, "engine 0: from both trainers, and to engines 1 and 3"
    alone = Stream(8, 0, (4,), "float32", *[torch.zeros(0).numpy()] * 3)
    assert stream_relays(alone, session) == [Relay(("trainer", 0), (), 4)]
    with pytest.raises(ValueError, match="'0' does not share /dev/shm"):
        start_session(
            "127.0.0.1", ["a"], [("0", "b")],
            transport="shared_memory", sharded=True, bucket_bytes=1, timeout=1.0, check_every=0, heartbeat_timeout=8,
        )  # fmt: skip


def failures(cluster: ShardedCluster, version: int) -> list[BaseException | None]:
    sending, receiving = cluster.start(version)
    return [future.exception(20) for future in (*sending, *receiving)]


@pytest.mark.parametrize("places", [HERE, APART])
def test_a_flipped_bit_names_bucket_tensors_and_ranks(tmp_path, monkeypatch, places):
    take = ShardedReceiver._load

    def corrupt(self, incoming, bucket, target):
        if self.name == "e1/1" and len(bucket.memory) > 100:
            bucket.memory = bucket.memory.clone()  # only this reader's copy
            bucket.memory[100] ^= 4
        before = list(target.left)
        try:
            take(self, incoming, bucket, target)
        except WeightSyncError:
            assert target.left == before, "unverified bytes must not reach a parameter"
            raise

    with open_cluster(tmp_path, places) as cluster:
        cluster.connect()
        cluster.update(1)
        monkeypatch.setattr(planned_receiver.ShardedReceiver, "_load", corrupt)
        start = time.monotonic()
        errors = failures(cluster, 2)
        cluster.close()
        assert time.monotonic() - start < 5, "no rank waits for transfers in flight"
        words = r"'e1/1' got other bytes than .* sent in bucket 0 of stream \d+ from trainer \d \((embed|odd|norm|exp)"
        assert re.search(words, str(errors[7]))
        aborted = [error for error in errors[:7] if error is not None]
        assert len(aborted) >= 2 and all(isinstance(error, WeightSyncError) for error in aborted)
        assert all("got other bytes" in str(error) for error in aborted), "the cause, not its consequences"


@pytest.mark.parametrize("check_every", [0, 2])
def test_loaded_weights_are_compared_with_the_export(tmp_path, check_every):
    """A slice packed with wrong values has matching fingerprints; only the check against the export names it."""
    with open_cluster(tmp_path, check_every=check_every) as cluster:
        cluster.connect()
        for version in (1, 2):
            cluster.update(version)
        exports = cluster.exports

        def wrong_embed():
            cluster.exports += 1
            weights = {name: weight.clone() for name, weight in cluster.weights.items()}
            weights["embed"][60, 30] += 1
            return weights.items()

        cluster.export = wrong_embed  # type: ignore[method-assign]
        errors = failures(cluster, 3)
        if check_every == 0:
            assert errors == [None] * 8 and cluster.exports == exports
            return
        message = str(errors[5])
        assert (
            "the weights that receiver 'e0/1' loaded differ from the trainers' export, in 1 tensors: embed (bucket"
            in message
        )
        assert "from trainer" in message and "set weight_sync.route=full" in message
        assert any(error is not None for error in errors[:4])


def test_missing_slices_are_refused_by_all_ranks(tmp_path):
    with open_cluster(tmp_path) as cluster:
        builder = SliceTableBuilder()
        builder.add(builder.tensor("unknown", (4, 4)), (0, 0, 4, 4), builder.parameter("p", "float32"), 0, 4)
        for receiver in cluster.receivers:
            receiver.collect_held()
            receiver.publish_needed(builder.build())
        for error in failures(cluster, 1):
            assert "of unknown: of these 16 elements the trainers hold 0" in str(error) or "aborted" in str(error)


def test_a_silent_peer_is_named_after_the_timeout(tmp_path):
    with open_cluster(tmp_path, timeout=1.5) as cluster:
        cluster.connect()
        cluster.update(1)
        receiving = [cluster.pool.submit(cluster.receive, number, 2) for number in range(4)]
        [cluster.pool.submit(cluster.senders[rank].send, 2, cluster.export) for rank in (0, 1, 2)]
        errors = [str(future.exception(10)) for future in receiving]
        assert any("waited 1.5 s for e" in error and "a bucket from trainers [3]" in error for error in errors), errors
    with open_cluster(tmp_path, timeout=1.5) as cluster:
        cluster.connect()
        cluster.update(1)
        sending = [cluster.pool.submit(sender.send, 2, cluster.export) for sender in cluster.senders]
        [cluster.pool.submit(cluster.receive, number, 2) for number in (0, 1, 2)]
        errors = [str(future.exception(10)) for future in sending]
        assert any("waited 1.5 s for " in error and "e1/1" in error for error in errors), errors


def test_plans_from_different_slice_tables_are_refused(tmp_path):
    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        cluster.receivers[2]._held = cluster.receivers[2]._held[:3]
        errors = failures(cluster, 1)
        assert "plan weight sync from different slice tables" in str(errors[6])


def test_an_unexpected_version_is_refused(tmp_path):
    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        cluster.update(1)
        receiving = cluster.pool.submit(cluster.receive, 0, 9)
        sending = [cluster.pool.submit(sender.send, 2, cluster.export) for sender in cluster.senders]
        assert "expects version 9, got 2" in str(receiving.exception(10))
        assert all("expects version 9, got 2" in str(future.exception(10)) for future in sending)


def test_every_nth_version_is_checked():
    session = Session(
        host="", port=0, prefix="", secret="", receivers=(), bucket_bytes=1, timeout=1, senders=(), transport="auto",
        check_every=3, heartbeat_timeout=8, sharded=True,
    )  # fmt: skip
    assert [version for version in range(5, 16) if session.is_checked(version, 5)] == [5, 8, 11, 14]


def test_a_full_shared_memory_is_an_error(tmp_path, monkeypatch):
    import errno

    def full(fd, start, size):
        raise OSError(errno.ENOSPC, "no room")

    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        monkeypatch.setattr(os, "posix_fallocate", full)
        errors = failures(cluster, 1)
        assert any(
            isinstance(error, OSError) and "is full: a weight bucket needs" in str(error) for error in errors[:4]
        )
        assert all("is full: a weight bucket needs" in str(error) for error in errors[4:]), errors
        assert os.listdir(tmp_path) == []


def test_slices_are_converted_once():
    """A bucket in bfloat16 is packed from float32 parameters with one conversion."""
    import numpy as np

    stream = Stream(0, 0, (0,), "bfloat16", np.array([6]), np.array([[0, 0, 0, 1, 4, 2, 3]]), np.array([0]))
    held = torch.arange(12, dtype=torch.float32) / 3
    memory = torch.empty(12, dtype=torch.uint8)
    fingerprints = Fingerprinter()
    packed = StreamCopier(stream).pack(0, memory, lambda _: held, fingerprints).result()
    expected = held[1:9].view(2, 4)[:, :3].bfloat16()
    assert torch.equal(memory.view(torch.bfloat16).view(2, 3), expected)
    target = torch.zeros(12)
    written, written_fingerprint = StreamCopier(stream).unpack(0, memory, lambda _: target, fingerprints)
    assert written == [(0, 6)] and written_fingerprint.result() == packed == fingerprint(memory.numpy())
    assert torch.equal(target[1:9].view(2, 4)[:, :3], expected.float())


def test_slice_fingerprints_cover_each_element(tmp_path):
    assert set(SHAPES) == {"embed", "norm", "experts.0", "experts.1", "odd"} and host_id(str(tmp_path))
    with open_cluster(tmp_path) as cluster:
        need = cluster.engines[2].description
        cluster.weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        cluster.engines[2].load(cluster.weights)
        examined = verify.SliceFingerprints(need)
        examined.add(range(6), cluster.engines[2].tensor)
        (expected,) = verify.expected_fingerprints(cluster.weights.items(), [need])
        assert expected == examined.fingerprints
        cluster.engines[2].view(5)[3, 2] += 1
        examined.add([5], cluster.engines[2].tensor)
        assert verify.differing_tensors(need, examined.fingerprints, expected) == ["odd"]


def test_the_dead_rank_is_named_and_not_the_waiting_ones(tmp_path):
    """A trainer's death breaks the other trainers' collective at once; the heartbeat reports the death 0.3 s later."""
    with open_cluster(tmp_path) as cluster:
        cluster.connect()

        def broken():
            cluster.pool.submit(lambda: (time.sleep(0.3), cluster.receivers[0]._channel.abort("trainer 1 died")))
            raise RuntimeError("Connection closed by peer")

        cluster.export = broken
        errors = failures(cluster, 1)
        assert "trainer 1 died" in str(errors[4]), errors
