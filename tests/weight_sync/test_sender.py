"""The trainers' senders: waits for loads, reports, and what an update that fails leaves behind."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.weight_sync.session import UpdateReport, WeightSyncError, merge_reports
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
