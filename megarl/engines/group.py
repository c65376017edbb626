"""Groups of engines that step together because the experts of their model are spread over all of them.

Every step is collective: an engine without requests takes part for its experts. Before each step the engines run one
small all-reduce to decide whether any engine has requests, and whether all have received the same collective command
(update weights, sleep). All decide from the same sums, so no engine waits in a step or update that another skips.

The rendezvous is a key-value store in the first engine's process. The all-reduce runs over gloo on every device. A
failing engine writes the cause to the store.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.cluster.key_value_store import serve_store
from megarl.engines.base import GroupRank
from megarl.errors import ProcessFailure

# Effectively no timeout: engines wait for each other while weights load or transfer, and only the controller knows how
# long that may take (rollout.start_timeout, weight_sync.timeout, rollout.timeout). A dead process is still noticed at once,
# by its closed connection.
_TIMEOUT = timedelta(days=30)
# Delay before a failing engine reports its failure. If another engine's death caused it, that is reported by then.
GRACE_SECONDS = 5.0
_PORTS = range(20000, 32000)


class GroupLost(ProcessFailure):
    """Another engine of the group is gone."""


@dataclass(frozen=True)
class GroupState:
    """State of all engines of a group between two steps, as sums.

    running: running requests. paused, leaving: engines in that state. ready: engines with a queued collective command.
    """

    running: int
    paused: int
    ready: int
    leaving: int


class Rendezvous:
    """The key-value store at which a group meets. Lives in the process of the group's first engine."""

    def __init__(self, host: str) -> None:
        """`host`: this machine's address for the other engines."""
        self._store = serve_store(host, _TIMEOUT)
        self.first = GroupRank(host, self._store.port)


class EngineGroup:
    """One engine's connection to its group. Only the thread that owns the engine uses it."""

    def __init__(self, group_rank: GroupRank, name: str) -> None:
        """Connect; returns once every engine of the group has connected. `name`: this engine's name, for messages."""
        self.host, self.rank, self.size = group_rank.host, group_rank.rank, group_rank.size
        self._name = name
        self._store = dist.TCPStore(self.host, group_rank.port, None, False, timeout=_TIMEOUT, wait_for_workers=False)
        store = dist.PrefixStore("gloo", self._store)
        self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, _TIMEOUT)

    def broadcast_from_first(self, key: str, make: Callable[[], str]) -> str:
        """Call `make` in the group's first engine; return its result in all engines."""
        if self.rank == 0:
            self._store.set(key, make())
        return str(self._store.get(key).decode())

    def sync_state(
        self, *, running: int = 0, paused: bool = False, ready: bool = False, leaving: bool = False
    ) -> GroupState:
        """Sum the states of all engines. Collective; raises GroupLost if an engine is gone."""
        sums = self._sum(torch.tensor([running, paused, ready, leaving], dtype=torch.int64))
        return GroupState(*sums.tolist())

    def intersect(self, names: Sequence[str], local: Collection[str]) -> list[str]:
        """Return the `names` that are in `local` in every engine. Collective; `names` must be equal in all engines."""
        counts = self._sum(torch.tensor([name in local for name in names], dtype=torch.int64))
        return [name for name, count in zip(names, counts.tolist(), strict=True) if count == self.size]

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        try:
            self._gloo.allreduce([values]).wait()
        except RuntimeError as error:
            raise GroupLost(f"another engine of its group is gone ({error})") from error
        return values

    def leave(self) -> None:
        """Notify the other engines, in an extra round, that this engine shuts down."""
        with contextlib.suppress(GroupLost):  # the other engines have ended, too
            self.sync_state(leaving=True)

    def fail(self, cause: str) -> str:
        """End the group because this engine failed. Returns `cause`, with an earlier failure in the group if one caused it."""
        local_failure = f"engine {self._name!r} {cause}"
        try:
            first_failure = self._store.compare_set("cause", "", local_failure).decode()
        except RuntimeError:  # the first engine's process is gone; the controller reports its cause
            first_failure = local_failure
        self._gloo = None  # closes the connections, so that waiting engines notice
        time.sleep(GRACE_SECONDS)
        return cause if first_failure == local_failure else f"{cause}. Earlier failure in its group: {first_failure}"


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free TCP ports, below the kernel's ephemeral range: other
    processes could take ephemeral ports at any moment."""
    draw = random.SystemRandom()
    while True:
        first = draw.randrange(_PORTS.start, _PORTS.stop - count)
        with contextlib.ExitStack() as probes:
            try:
                for number in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("", number))
            except OSError:
                continue
            return first
