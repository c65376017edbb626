"""Engines that step together, since the experts of their model are spread over all of them.

Every step of one is a step of all: who has no requests takes part all the same, for its experts. So before each
step the engines agree, in one small sum over all of them, on whether there is anything to step and on whether all
have been told to do something that none may do alone (take weights, sleep). All decide from the same sums: none can
wait for another in a step, or in an update, that the other does not take part in.

They meet in a key-value store that the first engine's process holds, and agree over gloo, whatever device the model
is on. A member that ends says why in the store.
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

from megarl.engines.base import Seat

# Members wait for each other while weights load or travel, and the controller knows how long that may take
# (rollout.start_timeout, exchange.timeout, rollout.timeout): a limit here could only be wrong. A process that died is
# noticed at once all the same, by its closed connection.
_PATIENCE = timedelta(days=30)
# Before a member says that it failed: where it did because another died, that death is known by then, and told first.
GRACE_SECONDS = 5.0
_PORTS = range(20000, 32000)


class GroupLost(RuntimeError):
    """Another engine of the group is gone."""


@dataclass(frozen=True)
class Agreement:
    """What all members together have said between two steps: sums over them.

    running: requests in flight. paused, leaving: members that are. ready: members that have been told to do something
    that all do together.
    """

    running: int
    paused: int
    ready: int
    leaving: int


class MeetingPlace:
    """The store in which a group meets; held by its first engine's process for as long as that lives."""

    def __init__(self, host: str) -> None:
        """`host`: this machine's address as the other engines reach it."""
        self._store = dist.TCPStore(host, 0, None, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
        self.seat = Seat(host, self._store.port)


class Group:
    """One engine's link to the others. Used by the thread that owns the engine, and by no other."""

    def __init__(self, seat: Seat, name: str) -> None:
        """Returns once every member is there. `name`: this engine's, for messages."""
        self.seat, self._name = seat, name
        self._store = dist.TCPStore(seat.host, seat.port, None, False, timeout=_PATIENCE, wait_for_workers=False)
        store = dist.PrefixStore("gloo", self._store)
        self._gloo: Any = dist.ProcessGroupGloo(store, seat.rank, seat.size, _PATIENCE)

    def of_the_first(self, key: str, make: Callable[[], str]) -> str:
        """What `make` returns in the group's first engine; in all of them."""
        if self.seat.rank == 0:
            self._store.set(key, make())
        return str(self._store.get(key).decode())

    def agree(self, *, running: int = 0, paused: bool = False, ready: bool = False, leaving: bool = False) -> Agreement:
        """Say what is so of this engine; hear what is of all. Returns when all have said it, or raises GroupLost."""
        sums = self._sum(torch.tensor([running, paused, ready, leaving], dtype=torch.int64))
        return Agreement(*sums.tolist())

    def in_all(self, names: Sequence[str], chosen: Collection[str]) -> list[str]:
        """Those of `names`, the same in all members, that each of them has in `chosen`."""
        counts = self._sum(torch.tensor([name in chosen for name in names], dtype=torch.int64))
        return [name for name, count in zip(names, counts.tolist(), strict=True) if count == self.seat.size]

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        try:
            self._gloo.allreduce([values]).wait()
        except RuntimeError as error:
            raise GroupLost(f"another engine of its group is gone ({error})") from error
        return values

    def leave(self) -> None:
        """Tell the others, in a round of its own, that this engine was told to end."""
        with contextlib.suppress(GroupLost):  # they have ended, too
            self.agree(leaving=True)

    def fail(self, cause: str) -> str:
        """End the group because this engine failed. Returns what to tell: where another failed before it, that, too."""
        own = f"engine {self._name!r} {cause}"
        try:
            first = self._store.compare_set("cause", "", own).decode()
        except RuntimeError:  # its process is gone, and the controller says of what
            first = own
        self._gloo = None  # closes the connections: who waits for this engine hears of it
        time.sleep(GRACE_SECONDS)
        return cause if first == own else f"{cause}. In its group, before it: {first}"


def free_ports(count: int) -> int:
    """The first of `count` TCP ports in a row that are free. Below those that the kernel gives to connections, of which
    another process may make one at any moment."""
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
