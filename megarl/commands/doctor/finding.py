"""Findings of checks, and the needs that a machine is checked against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megarl.platform.transformer_engine import AttentionNeeds
from megarl.weight_sync.session import FULL_SLOTS, SHARDED_SLOTS

Status = Literal["ok", "warning", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. The runner of the check fills in `check`, `host` and `rank` (node rank, if known)."""

    status: Status
    text: str
    remedy: str = ""
    check: str = ""
    host: str = ""
    rank: int | None = None

    def labelled(self, check: str, host: str = "") -> Finding:
        """Return the finding with `check` and `host` where it has none."""
        return replace(self, check=self.check or check, host=self.host or host)


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warning(text: str, remedy: str) -> Finding:
    return Finding("warning", text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding("FAIL", text, remedy)


@dataclass(frozen=True)
class Needs:
    """Requirements on a machine, as plain values that can be sent to every node. The defaults describe no recipe."""

    device: str = "auto"  # cluster.device
    recipe: bool = False  # True: the other fields were computed from a recipe
    trains: bool = True  # False: the recipe only has evaluation data
    nodes: int = 1  # nodes of the run or of the cluster
    engines: bool = True  # the recipe generates samples
    libraries: tuple[str, ...] = ("vllm",)  # names of the engines of policy, teachers and judge
    ray: bool = True  # processes are started by Ray
    processes: int = 0  # trainers, critics and devices of engines, in the whole run
    runs_dir: str = "runs"
    bucket_bytes: int = (
        64 << 20
    )  # size of a weight-sync bucket: weight_sync.bucket_mb, or the largest tensor if that is larger
    sync_ranks: int = 0  # ranks of the whole run with buckets of their own; 0: full weight sync, by one per machine
    shared_memory: bool = True  # the weight sync may use /dev/shm
    device_memory: bool = False  # weight_sync.transport is ipc: processes map each other's device memory
    checkpoint_bytes: int = 0  # size of one checkpoint; 0: unknown
    checkpoints: int = 0  # checkpoints on disk at the same time, with the one in progress
    attention: AttentionNeeds | None = None  # of the policy; None: unknown, or it does not depend on Transformer Engine
    sandbox: str = ""  # scorer or tool that needs the sandbox; "": none
    ray_address: str = ""  # Ray cluster that the run joins; "": a private one
    token: tuple[str, str] | None = None  # path and content of a file that every node must see

    @property
    def buckets(self) -> int:
        """The number of buckets in a machine's /dev/shm at the same time, if the ranks are spread evenly over `nodes`."""
        return SHARDED_SLOTS * -(-self.sync_ranks // self.nodes) if self.sync_ranks else FULL_SLOTS
