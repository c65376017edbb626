"""Which node of how many this one is, read from what launchers put into the environment."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 6379
DEFAULT_JOIN_TIMEOUT = 600.0

# The first variable that is set counts: ours, PyTorchJob's, Slurm's, an indexed Kubernetes Job's or JobSet's.
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_NODES = ("NNODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_MASTER = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_DEVICES = ("DEVICES_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE")
_NODE_LIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class Topology:
    """This node's place among the nodes."""

    node_rank: int
    nodes: int
    master: str  # address of node rank 0
    port: int  # of Ray's head; the launchers themselves talk on port + 1
    devices_per_node: int | None  # None: whatever Ray finds
    node_ip: str | None  # this node's address, where it is not left to Ray
    join_timeout: float  # seconds until every node must have joined

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0

    @property
    def ray_address(self) -> str:
        return f"{self.master}:{self.port}"


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Raises ValueError where the environment does not say enough, or contradicts itself."""
    nodes = _integer(environ, _NODES, 1)
    assert nodes is not None
    if nodes < 1:
        raise ValueError(f"{nodes} nodes: there is at least this one. Set NNODES, or leave it out.")
    master = _first(environ, _MASTER) or _slurm_head(environ) or ("127.0.0.1" if nodes == 1 else None)
    if master is None:
        raise ValueError(f"{nodes} nodes, and no address of the first: set MASTER_ADDR on every node, to the same.")
    rank = _node_rank(environ, nodes)
    if not 0 <= rank < nodes:
        raise ValueError(f"this node's rank is {rank}, and there are {nodes} nodes: ranks are 0 to {nodes - 1}.")
    port = _integer(environ, _PORT, DEFAULT_PORT)
    assert port is not None
    if not 1024 <= port <= 65533:
        raise ValueError(f"MASTER_PORT={port}: Ray takes it and megarl the next two, all of 1024 to 65535.")
    devices = _integer(environ, _DEVICES, None)
    if devices == 0:
        raise ValueError(
            "DEVICES_PER_NODE=0: a node without devices has no part in a run. Leave it out, and Ray looks."
        )
    node_ip = environ.get("MEGARL_NODE_IP")
    if nodes > 1 and _is_loopback(master):
        # Several nodes on one machine, to try things out: each has a loopback address of its own. Not
        # 127.0.0.1, which Ray takes for the machine's outer address.
        master, node_ip = "127.0.0.2", node_ip or f"127.0.0.{2 + rank}"
    try:
        timeout = float(environ.get("MEGARL_JOIN_TIMEOUT", DEFAULT_JOIN_TIMEOUT))
    except ValueError as error:
        raise ValueError(f"MEGARL_JOIN_TIMEOUT={environ['MEGARL_JOIN_TIMEOUT']} is no number of seconds.") from error
    return Topology(rank, nodes, master, port, devices, node_ip, timeout)


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-010,12],login1")
    'gpu007'
    """
    name = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", node_list.strip())
    assert name is not None  # every part is optional
    return name.group(1) + (name.group(2) or "") + name.group(3)


def _slurm_head(environ: Mapping[str, str]) -> str | None:
    node_list = _first(environ, _NODE_LIST)
    return first_host(node_list) if node_list else None


def _node_rank(environ: Mapping[str, str], nodes: int) -> int:
    rank = _integer(environ, _NODE_RANK, None)
    if rank is not None:
        return rank
    if nodes == 1:
        return 0
    # A StatefulSet's pods are numbered by name: trainer-0, trainer-1, ...
    ordinal = re.search(r"-(\d+)$", environ.get("HOSTNAME", ""))
    if ordinal:
        return int(ordinal.group(1))
    raise ValueError(
        f"{nodes} nodes, and this one does not know which it is: set NODE_RANK (0 on the first node). "
        f"Looked for {', '.join(_NODE_RANK)} and a HOSTNAME that ends in -<number>."
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _integer(environ: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int | None:
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return default
    if not environ[name].isdigit():
        raise ValueError(f"{name}={environ[name]} is no number.")
    return int(environ[name])


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host's name
        return False
