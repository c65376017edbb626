"""What a check found, and what checks are asked to hold a machine to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line. `check`, `host` and `rank` are filled in by who runs the check; `rank`: the node's, where it says one."""

    status: Status
    text: str
    remedy: str = ""
    check: str = ""
    host: str = ""
    rank: int | None = None


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warning(text: str, remedy: str) -> Finding:
    return Finding("warning", text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding("FAIL", text, remedy)


@dataclass(frozen=True)
class Needs:
    """What a machine is to be good for, in plain values that travel to every node. The defaults: nothing in particular."""

    device: str = "auto"  # cluster.device
    recipe: bool = False  # the rest is a recipe's
    trains: bool = True  # False: it has only data to evaluate on
    nodes: int = 1  # that the run goes over, or the cluster has
    engines: bool = True  # it samples
    ray: bool = True  # its processes are reached over Ray
    processes: int = 0  # trainers, critics and engines' devices, of the whole run
    runs_dir: str = "runs"
    bucket_bytes: int = 64 << 20  # of the exchange: exchange.bucket_mb, or the largest tensor where that is more
    buckets: int = 2  # that lie in a machine's /dev/shm at a time
    shared_memory: bool = True  # the exchange may use /dev/shm
    checkpoint_bytes: int = 0  # of one; 0: not known
    checkpoints: int = 0  # that are there at a time, the one being written included
    sandbox: str = ""  # what needs it; "": nothing that is known of
    ray_address: str = ""  # of the cluster that the run joins; "": a private one
    token: tuple[str, str] | None = None  # a file that every node must see, and what is in it
