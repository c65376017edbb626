"""Listening sockets and torch's key-value stores on the one interface that the other processes use.

torch binds its stores to all interfaces of the machine, and any process that reaches them can read and change every key.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from typing import Any


def listen_at(host: str, port: int = 0, backlog: int = socket.SOMAXCONN) -> socket.socket:
    """Return a socket that listens at `host` alone; at all interfaces if no interface of this machine has its address.

    The latter is the case behind address translation, as with Kubernetes services. `port`: 0 for any free one.
    Raises OSError if the port is taken.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


_reserved: dict[int, socket.socket] = {}  # by port


def reserve_port(host: str) -> int:
    """Return a free port of `host` at which this process listens from now on, until `serve_store` takes it.

    Without this, another process could take the port while this one loads torch.
    """
    listener = listen_at(host)
    port: int = listener.getsockname()[1]
    _reserved[port] = listener
    return port


def release_port(port: int) -> None:
    """Close a reserved port that no store needs."""
    _reserved.pop(port).close()


def serve_store(host: str, timeout: timedelta, port: int = 0) -> Any:
    """Serve a torch.distributed.TCPStore at `host` alone (see `listen_at`) until the returned object is deleted.

    port: one of `reserve_port`, another, or 0 for a free one.
    """
    import torch.distributed as dist

    listener = _reserved.pop(port, None) or listen_at(host, port)
    free: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        free,
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store closes it
    return store


def join_ranks(backend: str, timeout: timedelta) -> None:
    """Start torch's default process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, over `backend`.

    Rank 0 serves its store. Under torchrun, torchrun's agent does.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    if rank == 0:
        store = serve_store(host, timeout, port)
    else:
        store = dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
