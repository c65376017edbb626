"""An engine rank's side of a planned exchange."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megarl.platform import select
from megarl.weight_sync.fingerprint import Fingerprint, Fingerprints, VersionFingerprint
from megarl.weight_sync.heartbeat import HeartbeatClient
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, hops, name_of, of_holder
from megarl.weight_sync.session import (
    RECEIVE_AHEAD,
    ShardedReport,
    ShardedSession,
    WeightSyncError,
    abbreviate_names,
    stream_key,
)
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.buckets import Held, OutgoingBuckets, form_links, handles, mapped
from megarl.weight_sync.sharded.copy import Boxes
from megarl.weight_sync.sharded.mailbox import Answers, Mailbox
from megarl.weight_sync.sharded.plan import Hosts, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import SliceFingerprints
from megarl.weight_sync.shared_memory import MappedSlots
from megarl.weight_sync.store import StoreChannel

CompletedHook = Callable[[Iterable[int], Callable[[int], torch.Tensor]], None]


class Target(Protocol):
    """Where an engine rank's boxes go."""

    def tensor(self, parameter: int) -> torch.Tensor:
        """The memory of a parameter of the rank's description, to be written to."""
        ...

    def mark_written(self, parameter: int, elements: int) -> None:
        """So many elements of it have their value."""
        ...


@dataclass
class _Taken:
    """A bucket that was announced, and may still be on its way."""

    header: dict[str, Any]
    party: Peer  # in whose memory it lies
    memory: torch.Tensor  # uint8
    held: Held | None  # `memory`, where this rank passes it on
    broadcast: Any
    group: BroadcastGroup | None


class ShardedReceiver:
    """Takes versions in, one after the other. Not thread-safe.

    Once: `holdings` and `describe`. For each version: `begin`, `receive`, load what is left to be loaded, and `finish`; on
    any error call `fail(reason)`, which ends the update everywhere.
    """

    def __init__(self, session: ShardedSession, name: str) -> None:
        """`name` is this receiver's in `session.receivers` (ValueError if it is not)."""
        if name not in session.names:
            raise ValueError(f"receiver {name!r} is not part of this weight exchange; it has {sorted(session.names)}")
        self.name, self.rank = name, session.names.index(name)
        self._session = session
        self._channel = StoreChannel(session)
        self._slots = MappedSlots(session.shm_dir)
        # Said wherever memory is made: around a receiver vLLM has another default device.
        self._device = select(session.network_device).device()
        self._platform = select(session.device)
        self._memories: dict[tuple[Peer, int], torch.Tensor] = {}
        self._held: list[SliceTable] = []
        self._need: SliceTable | None = None
        self._boxes: dict[int, Boxes] | None = None  # by stream, once all is planned
        self._outbox: OutgoingBuckets | None = None
        self._first: int | None = None  # version that was received first
        self._fingerprints = Fingerprints(on_device=session.stays_on_devices)
        self._told: str | None = None  # where this rank said that it had loaded a version
        self._pulse = HeartbeatClient(self._channel, f"engine rank {name}")  # last: it has a thread and a connection

    def collect_held(self) -> list[SliceTable]:
        """What the trainers hold, rank by rank."""
        ranks = range(len(self._session.senders))
        self._held = manifest.hear(
            self._channel, [manifest.holder(rank) for rank in ranks], "the trainers to say what they hold"
        )
        return self._held

    def publish_needed(self, need: SliceTable) -> None:
        """Say what this rank needs. After `holdings`."""
        self._need = need
        manifest.tell(self._channel, manifest.needing(self.name), need)

    def _plan(self) -> dict[int, Boxes]:
        """Once, when all engine ranks have said what they need."""
        session, channel = self._session, self._channel
        needed = manifest.hear(
            channel, [manifest.needing(name) for name in session.names], "the engines to say what they need"
        )
        manifest.agree(channel, session, self._held, needed, first=False)
        hosts = Hosts(session.senders, [host for _, host in session.receivers])
        streams = plan_transfers(self._held, needed, hosts, session.bucket_bytes).streams_to(self.rank)
        boxes = {one.number: Boxes(one) for one in streams}
        reached = [hop for one in streams for hop in hops(one, session) if self.rank in hop.readers]
        self._inbox = Mailbox(channel, self.rank, len({hop.holder for hop in reached}))
        self._answers = Answers(channel, self.rank)
        self._own: Peer = ("engine", self.rank)
        self._passed_on: dict[int, Relay] = of_holder(self._own, streams, session)
        largest = max((one.largest for one in boxes.values()), default=0)
        self._outbox = OutgoingBuckets(channel, session, self._own, self._passed_on.values(), largest)
        for party in sorted({hop.holder for hop in reached if self.rank in hop.local}):
            self._map(party)
        self._links = form_links(channel, session, self._own, [*reached, *self._passed_on.values()])
        self._outbox.connect(self._links)
        self._boxes = boxes
        return boxes

    def _map(self, party: Peer) -> None:
        holder = name_of(party, self._session.names)
        (found,) = self._channel.wait([handles(party, self.rank)], f"{holder} to share its memory")
        for slot, handle in enumerate(found):
            self._memories[party, slot] = self._open((party, slot), handle, holder)
        self._channel.publish(mapped(party, self.rank), True)

    def _open(self, slot: tuple[Peer, int], handle: Any, holder: str) -> torch.Tensor:
        if not self._session.stays_on_devices:
            return self._slots.memory(slot, handle)
        try:
            return self._platform.open_shared(handle)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"receiver {self.name!r} cannot map the device memory of {holder} ({error}). Devices must reach each other, and "
                "containers share IPC and PID namespaces (docker run --ipc=host --pid=host); exchange.transport=auto goes "
                "through the host's memory"
            ) from error

    def begin(self, version: int) -> CompletedHook | None:
        """`version` comes next. Returns what each parameter is to be shown to, once it is complete and before anything is
        made of it; None in updates that are not held to the trainers' export."""
        assert self._need is not None, "describe() comes first"
        self._pulse.begin(version)
        self._version = version
        self._seconds = dict.fromkeys(("wait", "fingerprint", "load", "check"), 0.0)
        boxes = self._plan() if self._boxes is None else self._boxes
        self._first = version if self._first is None else self._first
        self._examined = SliceFingerprints(self._need) if self._session.checked(version, self._first) else None
        self._totals = {number: VersionFingerprint() for number in boxes}
        self._bytes = self._buckets = 0
        self._left = {number: len(one.stream.buckets) for number, one in boxes.items()}
        return None if self._examined is None else self._examined.examine

    def receive(self, target: Target) -> None:
        """Take every bucket into `target`. Raises WeightSyncError for another version, changed bytes, an abort, or a sender
        that died or fell silent."""
        taken: list[_Taken] = []
        expected, announced = sum(self._left.values()), 0
        while self._buckets < expected:
            while announced < expected and len(taken) < RECEIVE_AHEAD:
                header = self._inbox.poll() if taken else self._await_note()
                if header is None:
                    break
                taken.append(self._take(header))
                announced += 1
            self._load(taken.pop(0), target)
        self._received = time.perf_counter()

    def _await_note(self) -> dict[str, Any]:
        """Of the next bucket that anybody announces."""
        assert self._boxes is not None
        start = time.perf_counter()
        sources = sorted({self._boxes[number].stream.source for number, left in self._left.items() if left})
        header = self._inbox.take(f"{self.name}: a bucket from trainers {sources}")
        self._seconds["wait"] += time.perf_counter() - start
        return header

    def _take(self, header: dict[str, Any]) -> _Taken:
        assert self._boxes is not None
        if header["version"] != self._version:
            raise WeightSyncError(f"receiver {self.name!r} expects version {self._version}, got {header['version']}")
        party: Peer = (header["holder"][0], header["holder"][1])
        stream, bucket = header["stream"], header["bucket"]
        nbytes = self._boxes[stream].nbytes(bucket)
        if header["local"]:
            memory = self._memories[party, header["slot"]][:nbytes]
            return _Taken(header, party, memory, None, None, None)
        assert self._outbox is not None
        held = self._outbox.claim(nbytes) if stream in self._passed_on else None
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if held is None else held.memory
        group = self._links[party, self.rank]
        return _Taken(header, party, memory, held, group.start(memory if held is None else held.network), group)

    def _load(self, taken: _Taken, target: Target) -> None:
        assert self._boxes is not None and self._need is not None
        header, stream, bucket = taken.header, taken.header["stream"], taken.header["bucket"]
        what = self._what(stream, bucket)
        times = [time.perf_counter()]
        if taken.group is not None:
            taken.group.finish(taken.broadcast, f"{what} to reach {self.name}")
        times.append(time.perf_counter())
        known = None
        if taken.held is not None:  # nobody else gets what is not proven
            taken.held.copy_from_network()
            known = self._fingerprints.beside(taken.memory)
            self._compare(known, taken, what)
            told = {key: header[key] for key in ("version", "stream", "bucket", "fingerprint")}
            assert self._outbox is not None
            self._outbox.send(taken.held, self._passed_on[stream], told, what)
        times.append(time.perf_counter())
        written, found = self._boxes[stream].unpack(bucket, taken.memory, target.tensor, self._fingerprints, known)
        times.append(time.perf_counter())
        value = self._compare(found, taken, what)
        if header["local"]:
            self._platform.synchronize()  # the holder packs there again as soon as it has the answer
        self._answers.tell(taken.party, header["count"], value)
        times.append(time.perf_counter())
        for parameter, elements in written:  # only now may anything be made of them
            target.mark_written(parameter, elements)
        times.append(time.perf_counter())
        phases = ("wait", "fingerprint", "load", "fingerprint", "load")
        for phase, begin, end in zip(phases, times[:-1], times[1:], strict=True):
            self._seconds[phase] += end - begin
        self._totals[stream].add(str(bucket), value)
        self._left[stream] -= 1
        self._bytes += len(taken.memory)
        self._buckets += 1

    def _compare(self, found: Fingerprint, taken: _Taken, what: str) -> str:
        """The fingerprint of the bucket, which is the one that was sent."""
        value, sent = found.result(), taken.header["fingerprint"]
        if value != sent:
            sender = name_of(taken.party, self._session.names)
            raise WeightSyncError(
                f"receiver {self.name!r} got other bytes than {sender} sent in {what}: fingerprint {value}, sent {sent}"
            )
        return value

    def _what(self, stream: int, bucket: int) -> str:
        assert self._boxes is not None and self._need is not None
        one = self._boxes[stream]
        names = abbreviate_names(one.names(bucket, self._need.tensors))
        return f"bucket {bucket} of stream {stream} from trainer {one.stream.source} ({names})"

    def finish(self) -> ShardedReport:
        """Everything is loaded: tell the senders. Raises WeightSyncError where the trainers' export has other values."""
        self._seconds["load"] += time.perf_counter() - self._received
        assert self._outbox is not None, "receive() comes first"
        self._outbox.drain()
        start = time.perf_counter()
        if self._examined is not None:
            self._hold_to_export(self._examined)
        self._seconds["check"] += time.perf_counter() - start
        report = ShardedReport(
            version=self._version,
            streams={stream_key(number, self.name): one.hexdigest() for number, one in self._totals.items()},
            bytes=self._bytes,
            buckets=self._buckets,
            checked=len(self._examined.fingerprints) if self._examined is not None else 0,
            seconds=self._seconds,
        )
        key = f"done/{report.version}/{self.name}"
        self._channel.publish(key, report.to_dict())
        if self._told is not None:  # every sender has read it, or would not have sent the next version
            self._channel.delete([self._told])
        self._told = key
        self._pulse.end()
        return report

    def _hold_to_export(self, examined: SliceFingerprints) -> None:
        assert self._need is not None
        self._channel.publish(f"examined/{self._version}/{self.name}", examined.fingerprints)
        key = f"verdict/{self._version}/{self.name}"
        (wrong,) = self._channel.wait([key], "the trainers to compare with their export")
        self._channel.delete([key])
        if wrong:
            raise WeightSyncError(
                f"what receiver {self.name!r} loaded is not what the trainers export, in {len(wrong)} tensors: "
                + "; ".join(self._origin(name) for name in wrong[:3])
                + ". The planned exchange is wrong for this model or layout: set exchange.route=export, and report it"
            )

    def _origin(self, tensor: str) -> str:
        """Of a tensor: who sent its boxes, and in which buckets."""
        assert self._boxes is not None and self._need is not None
        found = [
            f"bucket {bucket} of stream {number} from trainer {one.stream.source}"
            for number, one in self._boxes.items()
            for bucket in range(len(one.stream.buckets))
            if tensor in one.names(bucket, self._need.tensors)
        ]
        return f"{tensor} ({', '.join(found)})"

    def fail(self, reason: str) -> None:
        """End the update everywhere: this receiver could not take or load it."""
        with contextlib.suppress(WeightSyncError):  # only where the session's own store is gone: everyone sees that
            self._channel.abort(f"receiver {self.name!r}: {reason}")
        self._pulse.end()

    def close(self) -> None:
        self._pulse.close()
        self._fingerprints.close()
        self._memories.clear()
        self._slots.close()
        if self._outbox is not None:  # its files would stay as long as this process, also where planning has failed
            self._outbox.close()
