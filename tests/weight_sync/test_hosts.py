"""Full weight sync over several simulated hosts: each host receives a version once, all links carry buckets at the same
time, the weights equal those on a single host, and a dead or silent relay is detected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.incoming import IncomingBuckets
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Relay, full_relays
from megarl.weight_sync.session import Session, WeightSyncError, compare_reports, host_id, merge_reports
from tests.weight_sync.test_full import assert_same, full_sender, make_weights, receive

HOSTS = {"a0": "here", "b0": "b", "c0": "c", "a1": "here", "b1": "b", "c1": "c", "b2": "b", "d0": "d"}
"""Receivers and their hosts: as engines that are not numbered host by host."""


def endpoints_of(shm_dir: Any, hosts: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, host_id(str(shm_dir)) if host == "here" else host) for name, host in hosts.items()]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes over gloo into each receiver, by its number in the session, and out of each holder."""
    moved: Counter[str] = Counter()
    form, start = BroadcastGroup.__init__, BroadcastGroup.start

    def formed(self: Any, channel: Any, rank: int, size: int, platform: Any, name: str, client: Any = None) -> None:
        assert size == 2, "every network transfer is between two"
        _, holder, reader = name.split("/")
        self.end = f"into {reader}" if rank else f"out of {holder}"
        form(self, channel, rank, size, platform, name, client)

    def started(self: Any, memory: torch.Tensor) -> Any:
        moved[self.end] += len(memory)
        return start(self, memory)

    monkeypatch.setattr(BroadcastGroup, "__init__", formed)
    monkeypatch.setattr(BroadcastGroup, "start", started)
    return moved


def update(sender: Any, receivers: list[FullReceiver], version: int, weights: dict[str, torch.Tensor]) -> Any:
    with ThreadPoolExecutor(len(receivers)) as pool:
        waiting = [pool.submit(receive, receiver, version) for receiver in receivers]
        sent = sender.send(version, weights.items)
        results = [future.result(20) for future in waiting]
    compare_reports(sent, merge_reports([report for _, report in results]))
    for got, _ in results:
        assert_same(got, weights)
    return sent


def test_each_host_gets_a_version_once(tmp_path: Any, network: Counter[str]) -> None:
    """Three versions over four hosts give the same bytes and fingerprints as receivers on the sender's host."""
    fingerprints = []
    for hosts in (HOSTS, dict.fromkeys(HOSTS, "here")):
        network.clear()
        with full_sender(endpoints_of(tmp_path, hosts), tmp_path) as sender:
            session = Session.from_json(sender.session.to_json())
            assert session == sender.session
            receivers = [FullReceiver(session, name) for name in hosts]
            sent = [update(sender, receivers, version, make_weights(version)) for version in (1, 2, 3)]
            total = sum(report.bytes for report in sent)
            assert os.listdir(tmp_path) == [], "a slot kept its name"
            for receiver in receivers:
                receiver.close()
        fingerprints.append([report.streams for report in sent])
        heads = {"into 1": total, "into 2": total, "into 7": total}  # b0, c0, d0
        links = {"out of trainer0": total, "out of engine1": total, "out of engine2": total}
        assert network == (heads | links if hosts is HOSTS else {})
    assert fingerprints[0] == fingerprints[1]


def test_without_shared_memory_each_receiver_gets_every_bucket(tmp_path: Any, network: Counter[str]) -> None:
    with full_sender(endpoints_of(tmp_path, HOSTS), tmp_path, "collective") as sender:
        receivers = [FullReceiver(sender.session, name) for name in HOSTS]
        sent = update(sender, receivers, 1, make_weights(1))
        assert {key: size for key, size in network.items() if key.startswith("into")} == {
            f"into {number}": sent.bytes for number in range(len(HOSTS))
        }
        assert max(network.values()) == sent.bytes, "someone sent a bucket twice"


def test_relays_visit_each_host_once(tmp_path: Any) -> None:
    with full_sender(endpoints_of(tmp_path, HOSTS), tmp_path) as sender:
        assert full_relays(sender.session) == [
            Relay(("trainer", 0), (0, 3), 1),
            Relay(("engine", 1), (4, 6), 2),
            Relay(("engine", 2), (5,), 7),
        ]
    alone = {"a": "here", "b": "here"}
    with full_sender(endpoints_of(tmp_path, alone), tmp_path) as sender:
        assert full_relays(sender.session) == [Relay(("trainer", 0), (0, 1), None)]


def test_links_carry_buckets_at_the_same_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer takes a while, and most links have one at the same moment. Sequential links would have one in all."""
    complete, lock, active = IncomingBuckets._complete, threading.Lock(), Counter[str]()

    def slow(self: Any, bucket: Any) -> None:
        with lock:
            active["now"] += 1
            active["most"] = max(active["most"], active["now"])
        time.sleep(0.02)
        with lock:
            active["now"] -= 1
        complete(self, bucket)

    monkeypatch.setattr(IncomingBuckets, "_complete", slow)
    hosts = {f"{host}0": host for host in "bcdef"}
    weights = {f"w{number}": torch.full((256,), float(number)) for number in range(16)}
    with (
        full_sender(endpoints_of(tmp_path, hosts), tmp_path, bucket_bytes=1024) as sender,
        ThreadPoolExecutor(len(hosts)) as pool,
    ):
        receivers = [FullReceiver(sender.session, name) for name in hosts]
        waiting = [pool.submit(receive, receiver, 1) for receiver in receivers]
        sent = sender.send(1, weights.items)
        for future in waiting:
            future.result(20)
    assert sent.buckets == 16
    assert active["most"] >= 3, f"{active['most']} of {len(hosts)} links"


@pytest.mark.parametrize("reader", ["of its host", "behind it"])
def test_corrupted_buckets_are_detected(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    """A relay's memory changes after its check: its readers and the next hosts report other bytes."""
    send = OutgoingBuckets.send

    def corrupted(self: Any, memory: Any, relay: Relay, header: dict[str, Any], description: str) -> None:
        if relay.holder == ("engine", 0) and header["bucket"] == 2:
            memory.memory[7] ^= 1
        send(self, memory, relay, header, description)

    monkeypatch.setattr(OutgoingBuckets, "send", corrupted)
    hosts = {"b0": "b", "b1": "b"} if reader == "of its host" else {"b0": "b", "c0": "c"}
    with full_sender(endpoints_of(tmp_path, hosts), tmp_path) as sender, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(receive, FullReceiver(sender.session, name), 1) for name in hosts]
        with pytest.raises(WeightSyncError, match="got other bytes than b0 sent in bucket 2"):
            sender.send(1, make_weights(1).items)
        for future in waiting:
            with pytest.raises(WeightSyncError, match="got other bytes than b0 sent in bucket 2"):
                future.result(10)


def test_a_silent_relay_is_detected_by_its_predecessor(tmp_path: Any) -> None:
    hosts = {"b0": "b", "b1": "b", "c0": "c"}
    with full_sender(endpoints_of(tmp_path, hosts), tmp_path, timeout=0.7) as sender, ThreadPoolExecutor(3) as pool:
        receivers = [FullReceiver(sender.session, name) for name in hosts]

        def stops() -> None:
            weights: Iterator[Any] = receivers[0].weights(1)
            next(weights)
            time.sleep(2)

        stopped = pool.submit(stops)
        waiting = [pool.submit(receive, receiver, 1) for receiver in receivers[1:]]
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"waited 0.7 s for .*bucket|aborted: .*waited 0.7 s for "):
            sender.send(1, make_weights(1).items)
        for future in waiting:
            with pytest.raises(WeightSyncError):
                future.result(10)
        assert time.monotonic() - start < 2
        stopped.result(10)


RELAY = """
import sys, time
from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.session import Session
receiver = FullReceiver(Session.from_json(sys.stdin.readline()), "b0")
for count, _ in enumerate(receiver.weights(1)):
    if count == 20:
        print("in flight", flush=True)
        time.sleep(60)
"""


def test_a_killed_relay_ends_the_update_on_all_receivers(tmp_path: Any) -> None:
    """The previous host's connection breaks; readers on the relay's host and the next hosts receive the abort."""
    hosts = {"a0": "here", "b0": "b", "b1": "b", "c0": "c"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with (
            full_sender(endpoints_of(tmp_path, hosts), tmp_path, bucket_bytes=256, timeout=60) as sender,
            ThreadPoolExecutor(4) as pool,
        ):
            print(sender.session.to_json(), file=process.stdin, flush=True)
            names = [name for name in hosts if name != "b0"]
            waiting = [pool.submit(receive, FullReceiver(sender.session, name), 1) for name in names]
            waiting.append(pool.submit(sender.send, 1, make_weights(1).items))
            assert process.stdout.readline() == "in flight\n"
            start = time.monotonic()
            process.send_signal(signal.SIGKILL)
            for future in waiting:
                with pytest.raises(
                    WeightSyncError, match=r"engine rank b0 \(process \d+ on .*\) died in the update to version 1"
                ):
                    future.result(20)
            assert time.monotonic() - start < 5
    finally:
        process.kill()
        process.wait(10)
