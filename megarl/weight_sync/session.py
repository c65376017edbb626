"""What sender and receivers agree on, as plain values, and what they report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

SHARED_MEMORY_DIR = "/dev/shm"
# Buckets that a sender holds at most. Exported: the next one is packed while engines load the last. Planned, at every rank:
# some are packed while engines take the others in.
FULL_SLOTS, SHARDED_SLOTS = 2, 4
RECEIVE_AHEAD = (
    2  # buckets that are on their way to a receiver over a network at a time, the one that is being loaded included
)
TRANSPORTS = ("auto", "shared_memory", "ipc", "collective", "device", "files")
HOST_MEMORY_TRANSPORTS = ("auto", "shared_memory")  # those by which ranks of a host read each other's files in /dev/shm
SHARED_MEMORY_TRANSPORTS = (
    *HOST_MEMORY_TRANSPORTS,
    "ipc",
)  # those by which ranks of a host read each other's memory, wherever it is
WORDS = 2**20  # of 32 bits, of which `ipc` takes sums at a time
SUM_BYTES = 4 * 8 * WORDS  # which become 64 bits: they, their places, factors and products
DEVICE_TRANSPORTS = ("device", "ipc")  # those whose buckets lie in devices' memory
_ABORT_CONNECT_SECONDS = 5.0


class WeightSyncError(RuntimeError):
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
    """How each receiver (name, host id) is reached: "shared_memory", "collective", "device" or "files".

    Raises ValueError for an unknown transport, a name that comes twice, no receivers, or shared
    memory asked for across hosts.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"exchange.transport is {transport!r}; it is one of {', '.join(TRANSPORTS)}")
    resolved: dict[str, str] = {}
    for name, host in endpoints:
        if name in resolved:
            raise ValueError(f"two receivers of weights are called {name!r}; give every engine its own name")
        if transport == "shared_memory" and host != sender_host:
            raise ValueError(
                f"exchange.transport is shared_memory, but receiver {name!r} does not share /dev/shm with the "
                f"sending trainer (it runs on {host}, the trainer on {sender_host}); use auto or collective"
            )
        near = "shared_memory" if transport == "auto" and host == sender_host else "collective"
        resolved[name] = near if transport == "auto" else transport
    if not resolved:
        raise ValueError("a weight exchange needs at least one receiver; none was given")
    return resolved


@dataclass(frozen=True, kw_only=True)
class SessionBase:
    """Where everyone that takes part in an exchange meets. Plain values: it travels as JSON.

    `host` and `port` are those of a key-value store in the process of the trainer's rank 0; `prefix` is random and
    keeps sessions apart. `receivers` have two words each, the first their name.
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
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["receivers"] = tuple((name, other) for name, other in values["receivers"])
        return cls(**values)

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
            raise WeightSyncError(
                f"the weight sender at {self.host}:{self.port} cannot be reached ({error}); is its process alive, "
                f"and is the port open between the two hosts?"
            ) from error

    def abort(self, reason: str) -> None:
        """End every wait of the session within a second or two, with `reason`. The first reason stands.

        Any process that knows the session may call it. Raises WeightSyncError where the sender's
        process is gone; its receivers have then noticed already.
        """
        import torch.distributed as dist

        store = self.open_store(min(self.timeout, _ABORT_CONNECT_SECONDS))
        try:
            store.compare_set(self.key("abort"), "", reason)
        except dist.DistError as error:
            raise WeightSyncError(f"the weight sender at {self.host}:{self.port} has just gone ({error})") from error


@dataclass(frozen=True, kw_only=True)
class FullSession(SessionBase):
    """Rank 0 sends all weights to everyone. `receivers` are (name, transport). `hosts`: host ids of the sender, then of each
    receiver; `hops.full_relays` derives from them the way of every bucket. `shares_memory`: receivers of one host read
    the same memory, else each gets its own over gloo. `directory`: of files, for "files".

    With `adapter_alpha` the first update brings the model's own weights and then its adapters, A and B of each linear under
    PEFT's names ("model.layers.0.self_attn.q_proj.lora_A.weight"), and each later one adapters alone: beside a linear
    engines add adapter_alpha / rank * B A x.
    """

    hosts: tuple[str, ...] = ()
    shares_memory: bool = True
    directory: str | None = None
    adapter_alpha: float | None = None  # None: every update brings whole weights

    @classmethod
    def from_json(cls, text: str) -> Self:
        session = super().from_json(text)
        return dataclasses.replace(session, hosts=tuple(session.hosts))


@dataclass(frozen=True, kw_only=True)
class ShardedSession(SessionBase):
    """Every trainer rank sends the boxes that engine ranks need, and no others. `receivers` are (name, host id); their
    order numbers the engine ranks. `senders`: host ids of the trainer ranks.

    `check_every`: the first update, and every so many after it, is held to the trainers' export as well. `silence`: seconds
    without a sign of life, in an update, after which a rank is taken for gone.
    """

    senders: tuple[str, ...]
    transport: str  # as `exchange.transport`
    check_every: int
    heartbeat_timeout: float
    device: str = "cpu"  # in whose memory buckets lie, as `cluster.device` has it; "cpu" unless the transport is of DEVICE_TRANSPORTS

    @property
    def shares_memory(self) -> bool:
        """Whether receivers map what a sender of their machine packs into."""
        return self.transport in SHARED_MEMORY_TRANSPORTS

    @property
    def stays_on_devices(self) -> bool:
        """Whether buckets reach the host's memory only where they go on to another machine."""
        return self.transport == "ipc"

    @property
    def network_device(self) -> str:
        """From whose memory buckets cross a network. Devices' collective libraries connect no two processes of one device,
        which `ipc` is for: gloo has a copy in the host's memory there."""
        return self.device if self.transport == "device" else "cpu"

    @classmethod
    def from_json(cls, text: str) -> Self:
        session = super().from_json(text)
        return dataclasses.replace(session, senders=tuple(session.senders))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.receivers]

    def checked(self, version: int, first: int) -> bool:
        """Whether the update to `version` is held to the export; `first`: the first one that was sent."""
        return is_check_due(version, first, self.check_every)


def is_check_due(version: int, first: int, every: int) -> bool:
    """Whether an update is checked: the `first`, and every so many after it (0: no other)."""
    return version == first or (every > 0 and (version - first) % every == 0)


Session = FullSession | ShardedSession


def session_from_json(text: str) -> Session:
    """The session that was written as JSON, whichever kind it is."""
    return (ShardedSession if "senders" in json.loads(text) else FullSession).from_json(text)


@dataclass(frozen=True)
class FullReport:
    """What one side of an update saw. Sender's and receivers' must agree in all but `seconds`."""

    version: int
    fingerprint: str  # 16 hexadecimal digits over names, types, shapes and bytes, in order
    bytes: int  # buckets as packed: tensors and alignment
    tensors: int
    buckets: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def agrees_with(self, other: FullReport) -> bool:
        return dataclasses.replace(self, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


def compare_full_reports(sent: FullReport, received: Mapping[str, FullReport]) -> None:
    """Raise WeightSyncError unless every receiver's report (by name) agrees with the sender's."""
    for name, report in received.items():
        if not sent.agrees_with(report):
            raise WeightSyncError(f"receiver {name!r} does not hold what was sent: sent {sent}, received {report}")


PHASES = ("pack", "fingerprint", "wait", "load", "check")  # of a planned update, on either side


@dataclass(frozen=True)
class ShardedReport:
    """What some of the ranks of a planned update sent, or received. The trainers' together and the engines' together
    must have the same `streams`."""

    version: int
    streams: dict[str, str]  # by `stream_key`: fingerprint of what travelled, in order
    bytes: int
    buckets: int
    checked: int  # boxes that were held to the trainers' export
    seconds: dict[str, float]  # by phase; of several ranks, the longest

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def abbreviate_names(names: Sequence[str]) -> str:
    """Tensors of a bucket, for messages."""
    return ", ".join(names[:3]) + (f", ... ({len(names)} tensors)" if len(names) > 3 else "")


Report = FullReport | ShardedReport


def report_from_dict(values: Mapping[str, Any]) -> Report:
    """The report that was told as plain values, whichever kind it is."""
    return ShardedReport(**values) if "streams" in values else FullReport(**values)


def stream_key(stream: int, receiver: str) -> str:
    return f"{stream} to {receiver}"


def merge_reports(reports: Sequence[ShardedReport]) -> ShardedReport:
    """Of several ranks, or engines."""
    phases = dict.fromkeys(phase for report in reports for phase in report.seconds)
    return ShardedReport(
        version=reports[0].version,
        streams={key: value for report in reports for key, value in report.streams.items()},
        bytes=sum(report.bytes for report in reports),
        buckets=sum(report.buckets for report in reports),
        checked=sum(report.checked for report in reports),
        seconds={phase: max(report.seconds.get(phase, 0.0) for report in reports) for phase in phases},
    )


def compare_sharded_reports(sent: ShardedReport, received: ShardedReport) -> None:
    """Raise WeightSyncError unless what was sent is what was received: the same streams with the same fingerprints."""
    differing = sorted(
        key
        for key in sent.streams.keys() | received.streams.keys()
        if sent.streams.get(key) != received.streams.get(key)
    )
    if differing or sent.version != received.version:
        shown = ", ".join(
            f"{key}: sent {sent.streams.get(key)}, received {received.streams.get(key)}" for key in differing[:3]
        )
        raise WeightSyncError(
            f"engines do not hold what was sent as version {sent.version} (they: {received.version}); "
            f"{len(differing)} streams differ: {shown}"
        )
