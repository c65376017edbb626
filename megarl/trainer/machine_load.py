"""Load of the run's machines and of the trainers' devices, by machine, as metrics `host/...`."""

from __future__ import annotations

import concurrent.futures
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.observe.log import RunLog
from megarl.platform.load import HostLoad, MachineLoad
from megarl.types import Metrics

if TYPE_CHECKING:
    from megarl.rollout.engine_handle import EngineHandle
    from megarl.trainer.group import TrainerGroup

ENGINE_SECONDS = 1.0  # a report of an engine that comes later is left out of the step
MAX_MACHINES = 16  # up to this number, each machine has metrics; of more machines only mean and maximum are logged


class MachineLoads:
    """Collects the reports of a step: of the trainers, of one engine on each machine without trainers, and of the controller's machine."""

    def __init__(self) -> None:
        self._controller = HostLoad()
        self._problems: set[str] = set()

    def log(self, log: RunLog, trainers: Iterable[TrainerGroup], engines: Sequence[EngineHandle]) -> None:
        """Log the load since the last call. A device that cannot be measured is a notice, once for each cause.

        engines: their processes have started, so that their machines are known.
        """
        reports = [report for group in trainers for report in group.machine_load()]
        measured = {report.machine for report in reports}
        others = {engine.service.host: engine for engine in reversed(engines) if engine.service.host not in measured}
        done, _ = concurrent.futures.wait([engine.machine_load() for engine in others.values()], ENGINE_SECONDS)
        # The failure of an engine is reported by the calls that need it.
        reports += [call.result() for call in done if call.exception() is None]
        reports.append(MachineLoad(socket.gethostname(), self._controller.take()))
        for report in reports:
            if report.problem and report.problem not in self._problems:
                self._problems.add(report.problem)
                log.notice(f"the devices' load is not measured on {report.machine} ({report.problem})")
        log.add(load_metrics(reports))
        space = shutil.disk_usage(log.run_dir.path)
        log.add({"host/run_disk": 1 - space.free / space.total, "host/run_disk_free_gb": space.free / 2**30})


def load_metrics(reports: Sequence[MachineLoad]) -> Metrics:
    """Return the metrics by machine. The first report of a machine counts for its host, all for its devices.

    Of several machines also the mean and the maximum.
    """
    hosts: dict[str, dict[str, float]] = {}
    devices: dict[str, list[Mapping[str, float]]] = {}
    for report in reports:
        if report.host:
            hosts.setdefault(report.machine, dict(report.host))
        if report.device:
            devices.setdefault(report.machine, []).append(report.device)
    for machine, looks in devices.items():
        busy = [look["device_utilization"] for look in looks]
        largest = max(look["device_memory"] for look in looks)
        load = {"device_memory": largest, "device_utilization": sum(busy) / len(busy)}
        hosts[machine] = {**hosts.get(machine, {}), **load}
    metrics: Metrics = {}
    for figure in dict.fromkeys(name for load in hosts.values() for name in load):
        values = {machine: load[figure] for machine, load in hosts.items() if figure in load}
        if len(values) <= MAX_MACHINES:
            metrics |= {f"host/{figure}/{machine}": value for machine, value in values.items()}
        if len(values) > 1:
            metrics[f"host/{figure}/mean"] = sum(values.values()) / len(values)
            metrics[f"host/{figure}/max"] = max(values.values())
    return metrics
