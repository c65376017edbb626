"""Number of nodes, node rank and head address, from the environment variables of common launchers."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 6379
DEFAULT_JOIN_TIMEOUT = 600.0

# The first variable that is set counts: megarl's, PyTorchJob's, Slurm's, then an indexed Kubernetes Job's or JobSet's.
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_NODES = ("NNODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_MASTER = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_DEVICES = ("DEVICES_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE")
# PyTorchJob sets "auto" unless nprocPerNode is given; torchrun counts devices for these words.
_DETECTED = {"PET_NPROC_PER_NODE": ("auto", "gpu", "cpu")}
_NODE_LIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class Topology:
    """This node's rank and the connection settings of the run."""

    node_rank: int
    nodes: int
    master: str  # address of node rank 0
    port: int  # of Ray's head; the launchers' rendezvous uses port + 1
    devices_per_node: int | None  # None: as Ray detects
    node_ip: str | None  # this node's address; None: as Ray detects
    join_timeout: float  # seconds until every node must have joined
    join_dir: str | None = None  # folder of the file with the run's secret; None: the run's `runs_dir`

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0

    @property
    def head_address(self) -> str:
        """Address of Ray's head. On the head itself a numeric one, under which Ray lists the node and megarl sorts it; else `master`.

        Raises OSError on the head if its name has no address.
        """
        return (self.node_ip or numeric_address(self.master)) if self.is_head else self.master

    @property
    def ray_address(self) -> str:
        return f"{self.head_address}:{self.port}"


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Read the topology from `environ`. Raises ValueError if variables are missing, malformed or contradictory."""
    nodes = _integer(environ, _NODES, 1)
    assert nodes is not None
    if nodes < 1:
        raise ValueError(f"{nodes} nodes: a run has at least one. Set NNODES to 1 or more, or leave it out.")
    master = _first(environ, _MASTER) or _slurm_head(environ) or ("127.0.0.1" if nodes == 1 else None)
    if master is None:
        raise ValueError(
            f"{nodes} nodes, but the address of the first is unknown: set MASTER_ADDR to the same value on every node."
        )
    rank = _node_rank(environ, nodes)
    if not 0 <= rank < nodes:
        raise ValueError(f"this node's rank is {rank}, but with {nodes} nodes ranks are 0 to {nodes - 1}.")
    port = _integer(environ, _PORT, DEFAULT_PORT)
    assert port is not None
    if not 1024 <= port <= 65533:
        raise ValueError(
            f"MASTER_PORT={port}: Ray uses this port and megarl the next two; all must be in 1024 to 65535."
        )
    counted = {name: value for name, value in environ.items() if value not in _DETECTED.get(name, ())}
    devices = _integer(counted, _DEVICES, None)
    if devices == 0:
        raise ValueError(
            "DEVICES_PER_NODE=0: a node without devices cannot take part in a run. Leave it out to let Ray detect devices."
        )
    node_ip = environ.get("MEGARL_NODE_IP")
    if nodes > 1 and _is_loopback(master):
        # Several nodes on one machine, for trials: each gets a separate loopback address. Not 127.0.0.1, which Ray
        # replaces by the machine's outer address.
        master, node_ip = "127.0.0.2", node_ip or f"127.0.0.{2 + rank}"
    try:
        timeout = float(environ.get("MEGARL_JOIN_TIMEOUT", DEFAULT_JOIN_TIMEOUT))
    except ValueError as error:
        value = environ["MEGARL_JOIN_TIMEOUT"]
        raise ValueError(f"MEGARL_JOIN_TIMEOUT must be a number of seconds, got {value}.") from error
    return Topology(rank, nodes, master, port, devices, node_ip, timeout, environ.get("MEGARL_JOIN_DIR") or None)


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-010,12],login1")
    'gpu007'
    """
    name = re.match(r"(\[[^\]]*\]|[^,])*", node_list.strip())
    assert name is not None  # it may be empty
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", name[0])


def _slurm_head(environ: Mapping[str, str]) -> str | None:
    node_list = _first(environ, _NODE_LIST)
    return first_host(node_list) if node_list else None


def _node_rank(environ: Mapping[str, str], nodes: int) -> int:
    rank = _integer(environ, _NODE_RANK, None)
    if rank is not None:
        return rank
    if nodes == 1:
        return 0
    # The pods of a StatefulSet have numbered names: trainer-0, trainer-1, ...
    ordinal = re.search(r"-(\d+)$", environ.get("HOSTNAME", ""))
    if ordinal:
        return int(ordinal.group(1))
    raise ValueError(
        f"{nodes} nodes, but the rank of this node is unknown: set NODE_RANK (0 on the first node). "
        f"megarl reads {', '.join(_NODE_RANK)} and a HOSTNAME that ends in -<number>."
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _integer(environ: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int | None:
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return default
    if not environ[name].isdigit():
        raise ValueError(f"{name} must be a whole number, got {environ[name]}.")
    return int(environ[name])


def numeric_address(name: str) -> str:
    """Return the address of a host name on this node, IPv4 where it has one. Raises OSError if it has none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def loopback_problem(topology: Topology) -> str | None:
    """Return an error if the head's name is a loopback address on the head itself, which other nodes cannot reach; else None.

    Debian and Ubuntu give a machine's own name the address 127.0.1.1 in /etc/hosts.
    """
    if topology.nodes == 1 or topology.node_ip is not None:
        return None
    try:
        address = socket.gethostbyname(topology.master)
    except OSError:
        return None  # the bind reports it
    if not _is_loopback(address):
        return None
    return (
        f"MASTER_ADDR={topology.master} is {address} on this node, which other nodes cannot reach. Set MASTER_ADDR on every node to "
        "this node's address in the nodes' network (ip -br addr); for launch/ssh.sh, write that address into the file of hosts."
    )


def address_notice(topology: Topology) -> str | None:
    """Return a notice if the run's nodes are taken to be on one machine, or if the head's name has no address on this node; else None.

    In Kubernetes the name may get an address later.
    """
    if topology.nodes > 1 and _is_loopback(topology.master):
        return (
            f"MASTER_ADDR is a loopback address, so all {topology.nodes} nodes must be on this machine, for trials: node rank 0 has "
            f"{topology.master}, this one {topology.node_ip}. With several machines, set it to the address of the first."
        )
    if topology.is_head:
        return None
    try:
        socket.getaddrinfo(topology.master, None)
    except OSError as error:
        return (
            f"MASTER_ADDR={topology.master} has no address on this node ({error.strerror}). Trying for "
            f"{topology.join_timeout:g} s (MEGARL_JOIN_TIMEOUT)."
        )
    return None


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host's name
        return False
