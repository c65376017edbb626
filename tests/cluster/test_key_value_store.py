"""Stores and listeners are reachable at the address of the run alone."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from megarl.cluster.key_value_store import join_ranks, listen_at, release_port, reserve_port, serve_store
from megarl.cluster.process import free_port
from tests.support.stack import ROOT, environment

TIMEOUT = timedelta(seconds=20)


def addresses_of(port: int) -> set[str]:
    """Return the IPv4 and IPv6 addresses at which a socket listens to `port`, from the kernel's tables (hexadecimal)."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]  # noqa: SIM115
    return {
        local.partition(":")[0] for _, local, _, state, *_ in lines if state == "0A" and local.endswith(f":{port:04X}")
    }


LOOPBACK_2 = {"0200007F"}  # 127.0.0.2


def test_a_store_listens_at_its_host_alone() -> None:
    store = serve_store("127.0.0.2", TIMEOUT)
    assert addresses_of(store.port) == LOOPBACK_2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)


def test_an_address_of_no_interface_is_reached_by_all() -> None:
    """Behind address translation a process cannot bind the address at which others reach it."""
    with listen_at("192.0.2.1") as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()


def test_a_taken_port_is_an_error() -> None:
    with listen_at("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1])


def test_the_ranks_meet_at_the_store_of_rank_0() -> None:
    port = free_port()
    code = "from datetime import timedelta; from megarl.cluster.key_value_store import join_ranks; "
    code += "import torch.distributed as dist; "
    code += "join_ranks('gloo', timedelta(seconds=60)); "
    code += "dist.barrier(); print({rank}, flush=True); {wait}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(rank=rank, wait="input()" if rank == 0 else "")],
            cwd=ROOT,
            env={
                **environment(),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.2",
                "MASTER_PORT": str(port),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline() == "0\n"
        assert addresses_of(port) == LOOPBACK_2
        ranks[0].communicate("\n", timeout=60)
        assert ranks[1].communicate(timeout=60)[0] == "1\n"
    finally:
        for rank in ranks:
            rank.kill()


def test_torchrun_serves_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, object] = {}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda backend, **more: arguments.update(more, backend=backend)
    )
    join_ranks("gloo", TIMEOUT)
    assert arguments == {"backend": "gloo", "timeout": TIMEOUT}


def test_a_reserved_port_is_served_and_cannot_be_taken() -> None:
    """Rank 0 names its port long before its store listens there: other processes of the machine must not get it."""
    port = reserve_port("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", port)
    store = serve_store("127.0.0.1", timedelta(seconds=5), port)
    assert store.port == port
    store.set("key", "value")
    assert store.get("key") == b"value"
    other = reserve_port("127.0.0.1")
    release_port(other)
    listen_at("127.0.0.1", other).close()


def test_process_groups_start_where_reserved_ports_are_known() -> None:
    """Rank 0's port is reserved: torch's own store cannot listen at it ("address already in use", over Ray only)."""
    root = ROOT / "megarl"
    files = {str(path.relative_to(root)) for path in root.rglob("*.py") if ".init_process_group(" in path.read_text()}
    without_devices = {"commands/plan/meta_device.py"}
    assert files == {"cluster/key_value_store.py"} | without_devices
