"""Load of this machine and of this process's device, as fractions and rates, for the metrics `host/...`, and a container's memory."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PERIOD = 2.0  # seconds between two looks at a device
_RDMA_WORD = 4  # bytes per unit of InfiniBand's counters of data
# Files of a container's limit and use below /sys/fs/cgroup, and the page cache's field in memory.stat: version 2, then 1.
_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class _Counters:
    """Totals since the machine's start: CPU ticks (all, idle), bytes (received, sent), and when they were read in seconds."""

    ticks: float
    idle: float
    received: float
    sent: float
    clock: float


class HostLoad:
    """Load of the machine from Linux's counters; on other systems `take` returns {}. Each `take` costs less than a millisecond."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._read() if (root / "proc/stat").exists() else None

    def take(self) -> dict[str, float]:
        """Return ``cpu`` (share of the cores' time), ``received_per_second`` and ``sent_per_second`` (bytes, without
        loopback) since the last call or the start, and ``memory`` (share in use now)."""
        if self._before is None:
            return {}
        before, now = self._before, self._read()
        self._before = now
        load = {"memory": self._memory()}
        if now.ticks > before.ticks:
            load["cpu"] = 1 - (now.idle - before.idle) / (now.ticks - before.ticks)
        if (seconds := now.clock - before.clock) > 0:
            load["received_per_second"] = max(0.0, now.received - before.received) / seconds
            load["sent_per_second"] = max(0.0, now.sent - before.sent) / seconds
        return load

    def _read(self) -> _Counters:
        # user nice system idle iowait irq softirq steal; the later columns are part of user
        ticks = [float(part) for part in (self._root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        received, sent = self._network()
        return _Counters(sum(ticks), ticks[3] + ticks[4], received, sent, time.monotonic())

    def _network(self) -> tuple[float, float]:
        """Return the bytes (received, sent) of network devices and of InfiniBand or RoCE, which Linux counts apart."""
        devices: dict[str, list[str]] = {}
        table = self._root / "proc/net/dev"
        for line in table.read_text().splitlines()[2:] if table.exists() else ():
            name, _, columns = line.partition(":")
            devices[name.strip()] = columns.split()
        devices.pop("lo", None)
        net = self._root / "sys/class/net"
        physical = [name for name in devices if (net / name / "device").exists()]  # a container has none
        totals = [sum(float(devices[name][column]) for name in physical or devices) for column in (0, 8)]
        for place, counter in enumerate(("port_rcv_data", "port_xmit_data")):
            files = (self._root / "sys/class/infiniband").glob(f"*/ports/*/counters/{counter}")
            totals[place] += _RDMA_WORD * sum(map(_rdma_counter, files))
        return totals[0], totals[1]

    def _memory(self) -> float:
        lines = (self._root / "proc/meminfo").read_text().splitlines()
        sizes = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
        return 1 - sizes["MemAvailable"] / sizes["MemTotal"]


def _rdma_counter(file: Path) -> float:
    """Return the counter's value, or 0 if the driver has none: reads fail with EINVAL, or give "N/A (no PMA)"."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0


def container_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the limit of this container's memory and its use, in bytes; None without a limit.

    The use is without the page cache that the kernel can drop.
    """
    for folder, limit, use, page_cache in _CGROUPS:
        files = [root / "sys/fs/cgroup" / folder / name for name in (limit, use, "memory.stat")]
        most, used, statistics = (file.read_text() if file.is_file() else "" for file in files)
        if most.strip().isdigit() and used.strip().isdigit():
            cached = re.search(rf"^{page_cache} (\d+)", statistics, re.M)
            return int(most), int(used) - (int(cached[1]) if cached else 0)
    return None


@dataclass
class DeviceSampler:
    """Looks at a device every `PERIOD` seconds, in a thread, until a look fails.

    look: returns (share of its memory in use by all processes, share of time in which it computed lately).
    """

    look: Callable[[], tuple[float, float]]
    problem: str = ""
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _looks: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        threading.Thread(target=self._run, name="device load", daemon=True).start()

    def _run(self) -> None:
        while not self.problem:
            self.sample()
            time.sleep(PERIOD)

    def sample(self) -> None:
        """Look once. A failure is kept in `problem`: a driver or a library may raise anything, and the run does not need it."""
        try:
            seen = self.look()
        except Exception as error:  # noqa: BLE001 - see above; the run's notices name it
            self.problem = f"{type(error).__name__}: {error}"
            return
        with self._guard:
            self._looks.append(seen)

    def take(self) -> dict[str, float]:
        """Return ``device_memory``, the largest since the last call, and ``device_utilization``, the mean; {} without a look."""
        with self._guard:
            looks, self._looks = self._looks, []
        if not looks:
            return {}
        memory, busy = zip(*looks, strict=True)
        return {"device_memory": max(memory), "device_utilization": sum(busy) / len(busy)}


@dataclass(frozen=True)
class MachineLoad:
    """Report of one process. host: `HostLoad.take`, {} if another process of the machine reports it. device: `DeviceSampler.take`.
    problem: why the device is not measured, or ""."""

    machine: str
    host: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
