"""Joining a Ray cluster, or starting a private one. Call `ray_env.prepare` before importing this."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import ray
from ray._private.services import canonicalize_bootstrap_address

from megarl.cluster.orphan_reaper import Guard
from megarl.cluster.ray.signals import termination_stays_ours

MIB = 1 << 20
STORE_SHARE = 0.3  # of what is free in /dev/shm, and of the memory
STORE_LEAST = 256 * MIB
CONNECT_SECONDS = 10.0  # left to a cluster's address to answer
# Of a private cluster. Ours ask for none (a process is one device, not one core), and Ray starts an idle
# worker for each.
PRIVATE_CPUS = 1

_SHARED_MEMORY = Path("/dev/shm")
# Limits that containers set: cgroup v2, then v1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def start(address: str | None, guard: Guard) -> None:
    """Connect this process to the cluster at `address`, or to a private one that it starts.

    Raises ValueError, with the remedy, where `address` cannot be joined.
    """
    with termination_stays_ours():
        if address:
            join(address)
        else:
            _start_private(guard)


def _start_private(guard: Guard) -> None:
    os.environ.update(guard.env)  # inherited by all that Ray starts
    try:
        ray.init(
            address="local",
            num_cpus=PRIVATE_CPUS,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=object_store_bytes(_free_shared_memory(), _memory()),
            logging_level="error",
            log_to_driver=False,
        )
    except Exception as error:
        if "amount of memory on this node" in str(error):
            raise RuntimeError(
                f"this machine has {_available() / 1e9:.1f} GB of memory left, too little for Ray: end what uses it (`ps aux "
                f"--sort=-rss | head`), or take another machine.\nRay says: {error}"
            ) from error
        if "timed out" not in str(error):  # Ray has no class for either
            raise
        load = f"{os.getloadavg()[0]:.0f} processes want to run on {os.cpu_count()} cores"
        raise RuntimeError(
            f"Ray did not start on this machine in time ({load}). Try again when it is less busy; Ray's logs are in "
            f"/tmp/ray/session_latest/logs.\nRay says: {error}"
        ) from error


def object_store_bytes(shared_memory: int, memory: int) -> int:
    """Size of a private cluster's object store.

    shared_memory: bytes free in /dev/shm; memory: bytes of memory in all.
    The store holds the token vectors of a few steps, in /dev/shm, where the weight exchange packs its
    buckets too: most is left to these, and a full store spills to disk where a full /dev/shm ends the run.
    """
    return max(STORE_LEAST, int(STORE_SHARE * min(shared_memory, memory)))


def join(address: str) -> None:
    """Connect to the cluster at `address`; raises as `start`."""
    remedy = (
        "(cluster.ray_address or RAY_ADDRESS): start it (launch/multinode.sh does), correct the address, or unset "
        "both for a private one on this machine."
    )
    if "://" in address:
        raise ValueError(
            f"the Ray address {address} is one of Ray's client or jobs server, which do not do {remedy} "
            "An address is host:port, or auto on a machine of the cluster."
        )
    try:
        if address != "auto" and not address.rpartition(":")[0]:
            raise ValueError(f"{address!r} is no Ray address {remedy} An address is host:port or auto.")
        # Ray itself would try for minutes; "auto" may name a cluster that is gone.
        host, _, port = (canonicalize_bootstrap_address(address) or "").rpartition(":")
        if not host:
            raise ValueError(f"no Ray cluster runs on this machine, and its address is given as {address} {remedy}")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError) as error:  # ConnectionError among them; RuntimeError: other versions, no token
        raise ValueError(f"no Ray cluster can be joined at {address} {remedy}\nRay says: {error}") from error


def _free_shared_memory() -> int:
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else _memory()


def _available() -> int:
    """Bytes of memory that this machine can still give, by the kernel's estimate."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory() -> int:
    """Bytes of this machine's memory, or of the container's."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in _LIMITS:
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)
