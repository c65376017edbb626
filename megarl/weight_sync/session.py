"""Sessions of a weight sync and reports of its updates, as plain values."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megarl.errors import ProcessFailure

SHARED_MEMORY_DIR = "/dev/shm"
# Buckets that a holder keeps in memory at most. Full: it packs the next bucket while engines load the last. Sharded, on
# every rank: it packs some buckets while engines load the others.
FULL_SLOTS, SHARDED_SLOTS = 2, 4
RECEIVE_AHEAD = 2  # buckets that a receiver has in flight over a network, including the one it loads
HOST_MEMORY_TRANSPORTS = ("auto", "shared_memory")  # ranks of a host map each other's files in /dev/shm
SHARED_MEMORY_TRANSPORTS = (*HOST_MEMORY_TRANSPORTS, "ipc")  # ranks of a host map each other's host or device memory
DEVICE_TRANSPORTS = ("device", "ipc")  # buckets are in device memory
SUM_WORDS = 2**20  # 32-bit words that `ipc` sums at a time
SUM_BYTES = 4 * 8 * SUM_WORDS  # device memory of that: words, indices, factors and products, 64 bits each
_ABORT_CONNECT_SECONDS = 5.0
_SIGNATURE_BYTES = 64
ABORT = "abort"  # key of the reason


class WeightSyncError(ProcessFailure):
    """An update failed, and its session with it: open a new one. The message names the place and the cause."""


@dataclass(frozen=True)
class AbortedUpdate:
    """Result of a trainer rank after an aborted update, if the run goes on (`rollout.min_engines`)."""

    reason: str


def host_id(shm_dir: str = SHARED_MEMORY_DIR) -> str:
    """Identify the processes that see the same files in `shm_dir`.

    The kernel's boot id distinguishes machines. The directory's device and inode distinguish containers of one machine,
    unless they share the directory.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    directory = os.stat(shm_dir)
    return f"{boot}/{directory.st_dev}/{directory.st_ino}"


def check_transport(transport: str, senders: Sequence[str], receivers: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError for a duplicate name, no receivers, or "shared_memory" across hosts.

    `senders`: host ids of the trainer ranks that send. `receivers`: (name, host id).
    """
    names: set[str] = set()
    for name, host in receivers:
        if name in names:
            raise ValueError(f"two receivers of weights are called {name!r}; give every engine its own name")
        names.add(name)
        remote = next((sender for sender in senders if sender != host), None)
        if transport == "shared_memory" and remote is not None:
            raise ValueError(
                f"weight_sync.transport is shared_memory, but receiver {name!r} does not share /dev/shm with the "
                f"sending trainer (it runs on {host}, the trainer on {remote}); use auto or collective"
            )
    if not names:
        raise ValueError("weight sync needs at least one receiver")


@dataclass(frozen=True, kw_only=True)
class Session:
    """Address of a session's key-value store, its ranks and its settings. Plain values: it travels as JSON.

    The trainers' rank 0 serves the store at `host` and `port`. `prefix` is random and separates the keys of sessions. Any
    process that reaches the store can read and change values; they are therefore signed with `secret`, which is never sent.
    `senders`: host ids of the trainer ranks that send: all ranks if `sharded`, otherwise rank 0. `receivers`: (name, host id)
    of the engine ranks; their order numbers them. `transport`: value of `weight_sync.transport`. `heartbeat_timeout`: seconds
    without a heartbeat, during an update, after which a rank counts as dead.

    Sharded: the first update, and every `check_every`-th after it, is compared with the trainers' export (0: the first only).

    Full: `directory` is for the transport "files". With `adapter_alpha`, the first update brings the model's weights and then
    its adapters, A and B of each linear under PEFT's names ("model.layers.0.self_attn.q_proj.lora_A.weight"). Later updates
    bring adapters alone. Engines add adapter_alpha / rank * B A x to the output of each linear.
    """

    host: str
    port: int
    prefix: str
    secret: str = field(repr=False)
    senders: tuple[str, ...]
    receivers: tuple[tuple[str, str], ...]
    sharded: bool
    transport: str
    bucket_bytes: int
    timeout: float  # seconds, of each wait
    heartbeat_timeout: float
    shm_dir: str = SHARED_MEMORY_DIR
    device: str = "cpu"  # of the buckets, a value of `cluster.device`; "cpu" unless `transport` is in DEVICE_TRANSPORTS
    check_every: int = 0
    directory: str | None = None
    adapter_alpha: float | None = None  # None: every update brings all weights

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Session:
        values = json.loads(text)
        values["senders"] = tuple(values["senders"])
        values["receivers"] = tuple((name, host) for name, host in values["receivers"])
        return cls(**values)

    @property
    def names(self) -> list[str]:
        """Names of the engine ranks."""
        return [name for name, _ in self.receivers]

    @property
    def slots(self) -> int:
        """Number of buckets that a holder keeps in memory at most."""
        return SHARDED_SLOTS if self.sharded else FULL_SLOTS

    @property
    def shares_memory(self) -> bool:
        """True if receivers map the memory that a sender of their host packs into."""
        return self.transport in SHARED_MEMORY_TRANSPORTS

    @property
    def stays_on_devices(self) -> bool:
        """True if buckets enter host memory only to go to another host."""
        return self.transport == "ipc"

    @property
    def network_device(self) -> str:
        """Device of the memory that network transfers read and write.

        Collective libraries cannot connect two processes of one device, the case that `ipc` is for: with `ipc`, gloo
        transfers a copy in host memory.
        """
        return self.device if self.transport == "device" else "cpu"

    def is_checked(self, version: int, first: int) -> bool:
        """Return True if the update to `version` is compared with the export. `first`: version of the first update."""
        return self.sharded and is_check_due(version, first, self.check_every)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def sign(self, name: str, value: bytes) -> bytes:
        """Return `value` with the signature that the key `name` of this session needs."""
        return self._signature(name, value) + value

    def verified(self, name: str, signed: bytes) -> bytes | None:
        """Return the value that `sign` has signed for the key `name`; None if another process wrote it."""
        signature, value = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(name, value)) else None

    def _signature(self, name: str, value: bytes) -> bytes:
        key = bytes.fromhex(self.secret)
        digest = hashlib.blake2b(self.key(name).encode() + b"\0" + value, key=key, digest_size=_SIGNATURE_BYTES // 2)
        return digest.hexdigest().encode()  # text, since compare_set takes and returns text

    def set_abort(self, store: Any, reason: str) -> None:
        """Abort the session over a connection to its store, unless it is aborted already."""
        signed = self.sign(ABORT, reason.encode())
        present = store.compare_set(self.key(ABORT), "", signed.decode())
        if self.verified(ABORT, bytes(present)) is None:  # a stranger's
            store.set(self.key(ABORT), signed)

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
        """End every wait of the session within a second or two. Only the first `reason` is kept.

        Any process that has the session may call it. Raises WeightSyncError if the process of the trainers' rank 0 is gone;
        receivers notice that without this call.
        """
        import torch.distributed as dist

        store = self.open_store(min(self.timeout, _ABORT_CONNECT_SECONDS))
        try:
            self.set_abort(store, reason)
        except dist.DistError as error:
            raise WeightSyncError(f"the weight sender at {self.host}:{self.port} has just gone ({error})") from error


def is_check_due(version: int, first: int, every: int) -> bool:
    """Return True for the `first` version and each `every`-th after it. 0: the first only."""
    return version == first or (every > 0 and (version - first) % every == 0)


PHASES = ("pack", "fingerprint", "wait", "load", "check")  # of an update, on either side


class PhaseTimer:
    """Seconds of an update's phases, which follow each other."""

    def __init__(self, *phases: str) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)
        self.start()

    def start(self) -> None:
        """Leave out the time until now."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclass(frozen=True)
class UpdateReport:
    """Report of one or more ranks of an update, as senders or as receivers.

    The merged reports of all trainers and of all engines must have equal `streams`.
    """

    version: int
    streams: dict[str, str]  # by `stream_key`: fingerprint of the stream's buckets, in order
    bytes: int
    buckets: int
    checked: int  # slices compared with the trainers' export
    seconds: dict[str, float]  # by phase; in a merged report, the longest of all ranks

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def abbreviate_names(names: Sequence[str]) -> str:
    """Return the first names and the number of all, for messages."""
    return ", ".join(names[:3]) + (f", ... ({len(names)} tensors)" if len(names) > 3 else "")


def done_key(update: int, receiver: str) -> str:
    """Key of a receiver's report. `update`: number in the session; a version may be sent twice."""
    return f"done/{update}/{receiver}"


def stream_key(stream: int, receiver: str) -> str:
    return f"{stream} to {receiver}"


def merge_reports(reports: Sequence[UpdateReport]) -> UpdateReport:
    """Merge the reports of several ranks or engines into one. Raises WeightSyncError if their versions differ."""
    versions = sorted({report.version for report in reports})
    if len(versions) > 1:
        raise WeightSyncError(
            f"ranks report different versions of the weights in one update: {', '.join(map(str, versions))}; all of them must "
            "report the version that was sent"
        )
    phases = dict.fromkeys(phase for report in reports for phase in report.seconds)
    return UpdateReport(
        version=versions[0],
        streams={key: value for report in reports for key, value in report.streams.items()},
        bytes=sum(report.bytes for report in reports),
        buckets=sum(report.buckets for report in reports),
        checked=sum(report.checked for report in reports),
        seconds={phase: max(report.seconds.get(phase, 0.0) for report in reports) for phase in phases},
    )


def compare_reports(sent: UpdateReport, received: UpdateReport) -> None:
    """Raise WeightSyncError unless both sides have the same streams with the same fingerprints."""
    differing = sorted(
        key
        for key in sent.streams.keys() | received.streams.keys()
        if sent.streams.get(key) != received.streams.get(key)
    )
    if differing or sent.version != received.version:
        examples = ", ".join(
            f"{key}: sent {sent.streams.get(key)}, received {received.streams.get(key)}" for key in differing[:3]
        )
        raise WeightSyncError(
            f"engines did not load the weights that were sent: sent version {sent.version}, received {received.version}; "
            f"{len(differing)} streams differ: {examples}"
        )
