"""The trainers' senders: waits for loads, reports, and what an update that fails leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.weight_sync.full.sender import FullSender
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.sender import ExportingRank, send_or_abort
from megarl.weight_sync.session import AbortedUpdate, UpdateReport, WeightSyncError, host_id, merge_reports
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.store import StoreChannel
from tests.support.sharded_ranks import open_cluster


def report(version: int) -> UpdateReport:
    return UpdateReport(version, {}, 0, 0, 0, {})


def test_reports_of_different_versions_are_not_merged() -> None:
    assert merge_reports([report(3), report(3)]).version == 3
    with pytest.raises(WeightSyncError, match=r"different versions of the weights in one update: 3, 4; all of them"):
        merge_reports([report(3), report(4), report(3)])


def test_waits_for_loads_ask_the_store_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of trainers wait at one store while engines load: one request each 50 ms, not each 5 ms."""
    call, finish, checks = StoreChannel._call, ShardedReceiver.finish, Counter[str]()

    def counted(self: StoreChannel, operation: Any, *arguments: Any) -> Any:
        if operation.__name__ == "check":
            checks[arguments[0][0].split("/")[1]] += 1
        return call(self, operation, *arguments)

    def loads(self: ShardedReceiver) -> UpdateReport:
        time.sleep(1.5)
        return finish(self)

    with open_cluster(tmp_path) as cluster:
        cluster.connect()
        monkeypatch.setattr(ShardedReceiver, "finish", loads)
        monkeypatch.setattr(StoreChannel, "_call", counted)
        cluster.update(1)
        assert 0 < checks["loaded"] < 4 * 60, "the first update is compared with the export"
        checks.clear()
        cluster.update(2)
        assert 0 < checks["done"] < 4 * 60


@pytest.fixture
def full(tmp_path: Path) -> Iterator[FullSender]:
    receivers = [("e", host_id(str(tmp_path)))]
    sender = FullSender.open(
        "127.0.0.1", receivers, bucket_bytes=512, timeout=20.0, heartbeat_timeout=8.0, shm_dir=str(tmp_path)
    )
    yield sender
    sender.close()


@pytest.mark.parametrize("aborted_at", [None, 0, 2])
@pytest.mark.parametrize("survives", [True, False])
def test_a_rank_that_goes_on_after_an_abort_drains_the_export(
    full: FullSender, aborted_at: int | None, survives: bool
) -> None:
    """The other ranks wait in the collectives of the export. `aborted_at`: the weight at which it happens; None: before the update."""
    exported: list[int] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            if number == aborted_at:
                full.session.abort("engine0 died")
            exported.append(number)
            yield f"w{number}", torch.zeros(64)

    if aborted_at is None:
        full.session.abort("engine0 died")
    if survives:
        result = send_or_abort(full, 1, export, survive_abort=True)
        assert isinstance(result, AbortedUpdate) and "engine0 died" in result.reason and exported == list(range(8))
    else:
        with pytest.raises(WeightSyncError, match="engine0 died"):
            send_or_abort(full, 1, export, survive_abort=False)
        assert len(exported) < 8, "the run ends, and does not wait for the rest"


def test_a_rank_without_a_sender_takes_part_in_the_export() -> None:
    exported: list[str] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        exported.append("w")
        yield "w", torch.zeros(1)
        exported.append("end")

    assert send_or_abort(ExportingRank(), 1, export, survive_abort=True) is None and exported == ["w", "end"]


@pytest.mark.parametrize("monitor_aborts", [True, False])
def test_a_broken_connection_is_no_reason_if_a_death_is_known_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monitor_aborts: bool
) -> None:
    with open_cluster(tmp_path) as cluster:
        sender, session = cluster.senders[1], cluster.session
        death = threading.Timer(0.3, session.abort, ["trainer 3 died"])

        def broken(version: int, export: Any) -> UpdateReport:
            if monitor_aborts:
                death.start()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection reset by peer")

        monkeypatch.setattr(sender, "_send", broken)
        with pytest.raises(RuntimeError, match="Connection reset"):
            sender.send(1, cluster.export)
        reason = sender._channel.abort_reason()
        assert reason == "trainer 3 died" if monitor_aborts else "trainer 1 failed: RuntimeError: [gloo" in str(reason)


@pytest.mark.parametrize("fault", ["fingerprinter", "link"])
def test_memory_is_freed_if_another_part_cannot_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fails() -> None:
        raise RuntimeError("cannot close")

    with open_cluster(tmp_path) as cluster:
        sender = cluster.senders[1]
        relays = [SimpleNamespace(local=[0], readers=[0], remote=None)]
        outgoing = OutgoingBuckets(sender._channel, cluster.session, ("trainer", 1), relays, 64)  # type: ignore[arg-type]
        sender._outgoing = outgoing
        assert os.listdir(tmp_path) != []
        if fault == "link":
            outgoing._links = {(("trainer", 1), 0): SimpleNamespace(close=fails)}  # type: ignore[dict-item]
        else:
            monkeypatch.setattr(sender._fingerprinter, "close", fails)
        with pytest.raises(RuntimeError, match="cannot close"):
            sender.close()
        assert os.listdir(tmp_path) == []
        monkeypatch.undo()
        outgoing._links = {}
