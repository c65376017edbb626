"""What sender and receivers agree on, as plain values, and what they report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SHARED_MEMORY_DIR = "/dev/shm"
_ABORT_CONNECT_SECONDS = 5.0


class ExchangeError(RuntimeError):
    """An update failed. The message says where and why; the session is dead and needs a new one."""


def host_id(shm_dir: str = SHARED_MEMORY_DIR) -> str:
    """Names what processes must share to reach each other's files in `shm_dir`.

    The kernel's boot id tells machines apart; the directory's device and inode tell containers of
    one machine apart, unless they share it.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    directory = os.stat(shm_dir)
    return f"{boot}/{directory.st_dev}/{directory.st_ino}"


def resolve_transports(transport: str, sender_host: str, endpoints: Iterable[tuple[str, str]]) -> dict[str, str]:
    """How each receiver (name, host id) is reached: "shared_memory" or "collective".

    Raises ValueError for an unknown transport, a name that comes twice, no receivers, or shared
    memory asked for across hosts.
    """
    if transport not in ("auto", "shared_memory", "collective"):
        raise ValueError(f"exchange.transport is {transport!r}; it is one of auto, shared_memory, collective")
    resolved: dict[str, str] = {}
    for name, host in endpoints:
        if name in resolved:
            raise ValueError(f"two receivers of weights are called {name!r}; give every engine its own name")
        if transport == "shared_memory" and host != sender_host:
            raise ValueError(
                f"exchange.transport is shared_memory, but receiver {name!r} does not share /dev/shm with the "
                f"sending trainer (it runs on {host}, the trainer on {sender_host}); use auto or collective"
            )
        local = transport != "collective" and host == sender_host
        resolved[name] = "shared_memory" if local else "collective"
    if not resolved:
        raise ValueError("a weight exchange needs at least one receiver; none was given")
    return resolved


@dataclass(frozen=True)
class ExchangeSession:
    """How to find the sender, and who receives. Plain values: it travels as JSON.

    `host` and `port` are those of a key-value store in the sender's process; `prefix` is random and
    keeps sessions apart. `receivers` are (name, transport); those with "collective" form, in this
    order and behind the sender, the ranks of one gloo group.
    """

    host: str
    port: int
    prefix: str
    receivers: tuple[tuple[str, str], ...]
    bucket_bytes: int
    timeout: float  # seconds that any one wait may take
    shm_dir: str = SHARED_MEMORY_DIR

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExchangeSession:
        values = json.loads(text)
        values["receivers"] = tuple((name, transport) for name, transport in values["receivers"])
        return cls(**values)

    @property
    def remote(self) -> tuple[str, ...]:
        """Receivers that the collective reaches, in rank order (rank 0 is the sender)."""
        return tuple(name for name, transport in self.receivers if transport == "collective")

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def open_store(self, timeout: float | None = None) -> Any:
        """A client of the session's key-value store (torch.distributed.TCPStore)."""
        import torch.distributed as dist

        try:
            return dist.TCPStore(
                self.host,
                self.port,
                None,
                False,
                timeout=timedelta(seconds=self.timeout if timeout is None else timeout),
                wait_for_workers=False,
            )
        except dist.DistError as error:
            raise ExchangeError(
                f"the weight sender at {self.host}:{self.port} cannot be reached ({error}); is its process alive, "
                f"and is the port open between the two hosts?"
            ) from error

    def abort(self, reason: str) -> None:
        """End every wait of the session within a second or two, with `reason`. The first reason stands.

        Any process that knows the session may call it. Raises ExchangeError where the sender's
        process is gone; its receivers have then noticed already.
        """
        store = self.open_store(min(self.timeout, _ABORT_CONNECT_SECONDS))
        store.compare_set(self.key("abort"), "", reason)


@dataclass(frozen=True)
class UpdateReport:
    """What one side of an update saw. Sender's and receivers' must agree in all but `seconds`."""

    version: int
    fingerprint: str  # 16 hexadecimal digits over names, types, shapes and bytes, in order
    bytes: int  # buckets as packed: tensors and alignment
    tensors: int
    buckets: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def agrees_with(self, other: UpdateReport) -> bool:
        return dataclasses.replace(self, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


def compare_reports(sent: UpdateReport, received: Mapping[str, UpdateReport]) -> None:
    """Raise ExchangeError unless every receiver's report (by name) agrees with the sender's."""
    for name, report in received.items():
        if not sent.agrees_with(report):
            raise ExchangeError(f"receiver {name!r} does not hold what was sent: sent {sent}, received {report}")
