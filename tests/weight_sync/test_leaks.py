"""A rank that fails to join a sharded weight sync leaves no thread, no connection and no shared memory."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.weight_sync import heartbeat, outgoing
from megarl.weight_sync import sender as sender_module
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.session import WeightSyncError
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.sharded.sender import ShardedSender
from megarl.weight_sync.shared_memory import PrivateSlot, SharedSlot
from megarl.weight_sync.store import StoreChannel
from tests.support.sharded_ranks import open_cluster, open_session, trainers

WATCH = ("megarl-heartbeat", "megarl-heartbeat-monitor", "megarl-fingerprint")


def connections(port: int) -> int:
    """Count this process's sockets that listen at `port` or are an end of a connection to it."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    peer = (
                        connection.getpeername()
                        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
                        else ()
                    )
                    count += port in (*connection.getsockname()[1:2], *peer[1:2])
        except OSError:  # closed meanwhile, or not connected
            continue
    return count


def settled(port: int) -> int:
    """Return `connections` after the sender's connection is accepted: the listening socket and both ends."""
    deadline = time.monotonic() + 10
    while connections(port) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return connections(port)


def threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith(WATCH)]


def port_of(session: Any, store: Any) -> int:
    return int(StoreChannel(session, store).read(["heartbeat port"])[0])


def assert_released(port: int, before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 3  # a watch ends within a beat
    while (threads(before) or connections(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (threads(before), connections(port)) == ([], 0)


def fail(*_: Any, **__: Any) -> Any:
    raise WeightSyncError("it cannot be published")


def without_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("fault", ["client", "slice table", "heartbeat thread", "heartbeat-monitor thread"])
def test_a_failed_sender_releases_threads_and_connections(tmp_path, monkeypatch, fault):
    """`caught` keeps the constructor's frames alive, as a stored traceback does."""
    session, store = open_session(tmp_path)
    held, before = trainers()[0], set(threading.enumerate())
    if fault == "client":
        monkeypatch.setattr(sender_module, "HeartbeatClient", fail)
    elif fault == "slice table":
        monkeypatch.setattr(manifest, "publish", fail)
    else:
        without_thread(monkeypatch, f"megarl-{fault.removesuffix(' thread')}")
    with pytest.raises((WeightSyncError, RuntimeError), match=r"cannot be published|new thread") as caught:
        ShardedSender(session, 0, held.description, held.tensors, store)
    assert_released(port_of(session, store), before)
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("fault", ["thread", "name"])
def test_a_failed_receiver_releases_threads_and_connections(tmp_path, monkeypatch, fault):
    session, store = open_session(tmp_path)
    held = trainers()[0]
    sender = ShardedSender(session, 0, held.description, held.tensors, store)
    port, before = port_of(session, store), set(threading.enumerate())
    mine = settled(port)
    if fault == "thread":
        without_thread(monkeypatch, "megarl-heartbeat")
    else:
        monkeypatch.setattr(heartbeat.socket, "gethostname", fail)
    with pytest.raises((WeightSyncError, RuntimeError), match=r"cannot be published|new thread") as caught:
        ShardedReceiver(session, "e0/0")
    deadline = time.monotonic() + 3
    with socket.create_connection((session.host, port)):  # accepted after the receiver's connection, which then counts
        while connections(port) < mine + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    while connections(port) > mine and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (threads(before), connections(port)) == ([], mine)
    assert caught.value.__traceback__ is not None
    sender.close()


@pytest.mark.parametrize("place", ["create_ack_keys", "handles_key"])
def test_memory_of_unpublished_buckets_is_released(tmp_path, monkeypatch, place):
    """The buckets' files still have names, so this process must remove them."""
    built: list[OutgoingBuckets] = []
    create = OutgoingBuckets.__init__

    def created(self: OutgoingBuckets, *arguments: Any) -> None:
        built.append(self)
        create(self, *arguments)

    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        monkeypatch.setattr(outgoing, place, fail)
        monkeypatch.setattr(OutgoingBuckets, "__init__", created)
        sending, receiving = cluster.start(1)
        assert all("cannot be published" in str(rank.exception(20)) for rank in (*sending, *receiving))
        assert os.listdir(tmp_path) == []
        assert built and all(len(slot._memory) == 0 for outgoing in built for slot in outgoing._slots)


def test_links_formed_before_a_failure_are_closed(tmp_path, monkeypatch):
    """A group that is not closed lives until the process ends, by design."""
    formed, closed = [], []

    class Group:
        def __init__(self, channel: Any, rank: int, size: int, platform: Any, name: str, client: Any) -> None:
            if len(formed) == 1:
                raise WeightSyncError("the second could not form")
            formed.append(name)
            self.close = lambda: closed.append(name)

    monkeypatch.setattr(outgoing, "BroadcastGroup", Group)
    session, store = open_session(tmp_path)
    links = [outgoing.Relay(("trainer", 0), (), reader) for reader in (0, 1)]
    with pytest.raises(WeightSyncError, match="the second could not form"):
        outgoing.form_links(StoreChannel(session, store), session, ("trainer", 0), links)
    assert formed == closed == ["link/trainer0/0"]


def test_a_slot_whose_file_is_gone_is_closed(tmp_path: Path) -> None:
    slot, descriptors = SharedSlot(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    slot.reserve(100)
    (tmp_path / slot.name).unlink()
    slot.reserve(200)  # in a new file
    (tmp_path / slot.name).unlink()
    slot.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_private_memory_is_freed_before_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, allocate = PrivateSlot(torch.device("cpu")), torch.empty
    slot.reserve(100)
    former, in_use = weakref.ref(slot._memory), []

    def empty(size: int, **options: Any) -> torch.Tensor:
        in_use.append(former() is not None and size > 0)
        return allocate(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    assert len(slot.reserve(200)) == 200 and not any(in_use)
