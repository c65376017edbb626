"""Load of machines and devices, from counters written by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.platform import select
from megarl.platform.load import DeviceSampler, HostLoad, container_memory

NET = "Inter-| Receive\n face |bytes\n"


def write_counters(root: Path, busy: int, idle: int, received: int, sent: int, *, rdma: int = 0) -> None:
    """Write the files of a machine with the devices lo, eth0 (physical) and docker0."""
    for folder in ("proc/net", "sys/class/net/eth0/device", "sys/class/infiniband/mlx5_0/ports/1/counters"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {idle} 5 0 0 0 7 0\ncpu0 1 2 3 4 5 6 7 8\n")
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n")
    lines = [f"{name}: {count} 1 0 0 0 0 0 0 {out} 2 0 0 0 0 0 0" for name, count, out in (("    lo", 9**9, 9**9), ("  eth0", received, sent), ("docker0", 9**9, 9**9))]  # fmt: skip
    (root / "proc/net/dev").write_text(NET + "\n".join(lines) + "\n")
    for name in ("port_rcv_data", "port_xmit_data"):
        (root / f"sys/class/infiniband/mlx5_0/ports/1/counters/{name}").write_text(f"{rdma}\n")


def test_load_is_the_change_of_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    write_counters(tmp_path, busy=100, idle=900, received=1000, sent=50)
    load = HostLoad(tmp_path)
    clock[0] = 110.0
    write_counters(tmp_path, busy=175, idle=925, received=3000, sent=150, rdma=10)
    assert load.take() == {"memory": 0.75, "cpu": 0.75, "received_per_second": 204.0, "sent_per_second": 14.0}
    clock[0] = 120.0
    assert load.take() == {"memory": 0.75, "received_per_second": 0.0, "sent_per_second": 0.0}, "no tick has passed"
    clock[0] = 130.0
    write_counters(tmp_path, busy=175, idle=1025, received=0, sent=150, rdma=10)
    assert load.take()["received_per_second"] == 0.0, "a device that was reset does not count backwards"


def test_a_container_counts_its_virtual_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", iter((0.0, 1.0)).__next__)
    write_counters(tmp_path, 1, 1, 0, 0)
    (tmp_path / "sys/class/net/eth0/device").rmdir()
    zeros = "0 " * 15
    (tmp_path / "proc/net/dev").write_text(f"{NET}lo: 5 {zeros}\neth0: 10 {zeros}\n")
    load = HostLoad(tmp_path)
    (tmp_path / "proc/net/dev").write_text(f"{NET}lo: 99 {zeros}\neth0: 40 {zeros}\n")
    assert load.take()["received_per_second"] == 30.0


def test_an_rdma_counter_that_cannot_be_read_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx4's virtual functions have a text in place of the number; reading Broadcom's counters fails."""
    monkeypatch.setattr(time, "monotonic", iter((0.0, 1.0)).__next__)
    write_counters(tmp_path, 1, 1, 0, 0)
    ports = [tmp_path / f"sys/class/infiniband/{device}/ports/1/counters" for device in ("mlx4_0", "bnxt_re0")]
    for port in ports:
        port.mkdir(parents=True)
    (ports[0] / "port_rcv_data").write_text("N/A (no PMA)\n")
    (ports[1] / "port_rcv_data").mkdir()  # reading a folder raises OSError
    load = HostLoad(tmp_path)
    write_counters(tmp_path, 1, 1, 0, 0, rdma=10)
    assert load.take()["received_per_second"] == 40.0


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "7"}, None),
        ({"memory.max": "100", "memory.current": "70", "memory.stat": "file 50\ninactive_file 30\n"}, (100, 40)),
        ({"memory.max": "100", "memory.current": "70"}, (100, 70)),
        ({"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "70", "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n"}, (100, 50)),
    ],
)  # fmt: skip
def test_memory_of_a_container(files: dict[str, str], expected: tuple[int, int] | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert container_memory(tmp_path) == expected


def test_other_systems_have_no_load(tmp_path: Path) -> None:
    assert HostLoad(tmp_path).take() == {}


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux's counters")
def test_this_machine_reports_it_cheaply() -> None:
    """At most 5 ms of CPU time a step, so that steps of half a second lose less than 1 %."""
    load = HostLoad()
    assert 0 < load.take()["memory"] < 1
    began, rounds = time.process_time(), 50
    for _ in range(rounds):
        load.take()
    assert (time.process_time() - began) / rounds < 0.005


def test_a_device_is_looked_at_until_a_look_fails() -> None:
    looks: Iterator[tuple[float, float] | OSError] = iter([(0.5, 1.0), (0.75, 0.5), OSError("no counters")])

    def look() -> tuple[float, float]:
        seen = next(looks)
        if isinstance(seen, OSError):
            raise seen
        return seen

    sampler = DeviceSampler(look)
    assert sampler.take() == {}
    sampler.sample()
    sampler.sample()
    assert sampler.take() == {"device_memory": 0.75, "device_utilization": 0.75} and sampler.take() == {}
    sampler.sample()
    assert sampler.problem == "OSError: no counters" and sampler.take() == {}


def test_a_cpu_has_no_counters_of_a_device() -> None:
    assert select("cpu").device_load() is None
