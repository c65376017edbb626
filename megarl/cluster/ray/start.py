"""Join a Ray cluster or start a private one. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import ray
from ray._private.services import canonicalize_bootstrap_address

from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.ray.processes import without_unused_processes
from megarl.cluster.ray.signals import keep_sigterm_handler, separate_process_groups
from megarl.errors import ProcessFailure
from megarl.platform.load import container_memory

MIB = 1 << 20
STORE_SHARE = 0.3  # of the free /dev/shm and of the memory, whichever is less
STORE_LEAST = 256 * MIB
CONNECT_SECONDS = 10.0  # timeout of a connection to a cluster's address
# CPUs of a private cluster. megarl's actors request none (they take devices, not cores), and Ray starts an idle worker
# per CPU.
PRIVATE_CPUS = 1

_SHARED_MEMORY = Path("/dev/shm")


def start(address: str | None, reaper: OrphanReaper | None) -> None:
    """Connect this process to the cluster at `address`, or start a private cluster, which `reaper` ends.

    Raises ValueError, with the remedy, if `address` cannot be joined.
    """
    with keep_sigterm_handler():
        if address:
            join(address)
        else:
            assert reaper is not None
            _start_private(reaper)


def _start_private(reaper: OrphanReaper) -> None:
    os.environ.update(reaper.env)  # inherited by all processes of Ray
    try:
        with separate_process_groups(), without_unused_processes():
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
                f"this machine has {_available() / 1e9:.1f} GB of memory left, too little for Ray: end the processes that use "
                f"it (`ps aux --sort=-rss | head`), or use another machine.\nRay reports: {error}"
            ) from error
        if "timed out" not in str(error):  # Ray has no exception class for either case
            raise
        load = f"{os.getloadavg()[0]:.0f} runnable processes on {os.cpu_count()} cores"
        raise ProcessFailure(
            f"Ray did not start on this machine in time ({load}). Try again when the load is lower; Ray's logs are in "
            f"/tmp/ray/session_latest/logs.\nRay reports: {error}"
        ) from error


def object_store_bytes(shared_memory: int, memory: int) -> int:
    """Size of a private cluster's object store.

    shared_memory: free bytes of /dev/shm; memory: total bytes of memory.
    The store keeps the token vectors of a few steps in /dev/shm. The weight sync puts its buckets there too, so the
    store takes only `STORE_SHARE`: a full store spills to disk, while a full /dev/shm ends the run.
    """
    return max(STORE_LEAST, int(STORE_SHARE * min(shared_memory, memory)))


def join(address: str) -> None:
    """Connect to the cluster at `address`. Raises ValueError, with the remedy, if it cannot be joined."""
    remedy = (
        "(cluster.ray_address or RAY_ADDRESS): start the cluster (launch/multinode.sh does), correct the address, or "
        "unset both for a private cluster on this machine."
    )
    if "://" in address:
        raise ValueError(
            f"the Ray address {address} belongs to Ray's client or jobs server, which megarl does not support {remedy} "
            "Write host:port, or auto on a machine of the cluster."
        )
    try:
        if address != "auto" and not address.rpartition(":")[0]:
            raise ValueError(f"{address!r} is not a Ray address {remedy} Write host:port or auto.")
        # Ray retries for minutes; "auto" may refer to a cluster that has ended.
        host, _, port = (canonicalize_bootstrap_address(address) or "").rpartition(":")
        if not host:
            raise ValueError(f"no Ray cluster runs on this machine, and the configured address is {address} {remedy}")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError) as error:  # OSError: no connection; RuntimeError: version mismatch, missing token
        raise ValueError(f"cannot join a Ray cluster at {address} {remedy}\nRay reports: {error}") from error


def _free_shared_memory() -> int:
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else _memory()


def _available() -> int:
    """Bytes of available memory of this machine, by the kernel's estimate."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory() -> int:
    """Bytes of memory of this machine, or of the container's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = container_memory()
    return min(total, container[0]) if container else total
