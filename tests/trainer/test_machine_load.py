"""Metrics of machines from the reports of trainers, engines and the controller."""

from __future__ import annotations

import json
import socket
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import recovery
from megarl.observe.log import RunLog
from megarl.platform.load import MachineLoad
from megarl.trainer import machine_load
from megarl.trainer.machine_load import MachineLoads, load_metrics
from tests.support.dying_engines import Engines
from tests.support.log_recipe import make_recipe


def test_one_report_counts_for_a_host_and_all_for_its_devices() -> None:
    reports = [
        MachineLoad("a", {"cpu": 0.5}, {"device_memory": 0.9, "device_utilization": 1.0}),
        MachineLoad("a", {}, {"device_memory": 0.5, "device_utilization": 0.5}),
        MachineLoad("a", {"cpu": 0.7}),
    ]
    one = {"host/cpu/a": 0.5, "host/device_memory/a": 0.9, "host/device_utilization/a": 0.75}
    assert load_metrics(reports) == one
    several = load_metrics([*reports, MachineLoad("b", {"cpu": 1.0})])
    assert several == one | {"host/cpu/b": 1.0, "host/cpu/mean": 0.75, "host/cpu/max": 1.0}
    assert load_metrics([]) == {}


def test_many_machines_have_only_mean_and_maximum() -> None:
    reports = [MachineLoad(f"n{i}", {"cpu": i / 100}) for i in range(20)]
    assert load_metrics(reports) == {"host/cpu/mean": pytest.approx(0.095), "host/cpu/max": 0.19}


class Engine:
    """An engine on machine `host`. `answer`: its report, the error of the call, or None for a call that does not end."""

    def __init__(self, host: str, answer: MachineLoad | Exception | None) -> None:
        self.service, self.answer, self.asked = SimpleNamespace(host=host), answer, 0

    def machine_load(self) -> Future[MachineLoad]:
        self.asked += 1
        future: Future[MachineLoad] = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


def test_engines_that_start_are_not_asked() -> None:
    """Their machine is not known before Ray has started the process: a step would wait for it."""
    engines = Engines(count=3)
    engines.services[1].die()
    engines.fleet.poll()
    run: Any = SimpleNamespace(fleet=engines.fleet, profiling=SimpleNamespace(engines=engines.handles))
    assert recovery._running_engines(run) == [engines.handles[0], engines.handles[2]]
    run.fleet = None
    assert recovery._running_engines(run) == engines.handles


def test_an_engine_reports_where_no_trainer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are dead or busy are left out; a device without counters is a notice, once."""
    monkeypatch.setattr(machine_load, "ENGINE_SECONDS", 0.01)
    trainers: Any = SimpleNamespace(machine_load=lambda: [MachineLoad("a", {"cpu": 0.5}, {}, "no library")])
    engines: Any = [Engine("a", None), Engine("b", MachineLoad("b", {"cpu": 0.25})), Engine("b", None)]
    engines += [Engine("c", OSError("dead")), Engine("d", None)]
    loads = MachineLoads()
    with RunLog(make_recipe(), tmp_path, 1, 2) as log:
        for step in (1, 2):
            loads.log(log, [trainers], engines)
            log.step(step)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["host/cpu/a"] == 0.5 and line["host/cpu/b"] == 0.25 and f"host/memory/{socket.gethostname()}" in line
    assert "host/cpu/c" not in line and "host/cpu/d" not in line
    assert 0 < line["host/run_disk"] < 1 and line["host/run_disk_free_gb"] > 0
    assert [engine.asked for engine in engines] == [0, 2, 0, 2, 2]
    (notice,) = (tmp_path / "notices.jsonl").read_text().splitlines()
    assert "not measured on a (no library)" in notice
