"""Buckets over a network: groups of a holder (rank 0) and the receiver of another host that it passes buckets on to.

Over gloo, from host memory, on every platform and next to whatever collective library training uses; or from a device's
memory to another's, over the library of that device.
"""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.platform import Platform
from megarl.weight_sync.session import WeightSyncError
from megarl.weight_sync.store import StoreChannel

CAUSE_SECONDS = 1.0  # left to the cause of a broken connection to become known
_POLL_SECONDS = 0.001


class BroadcastGroup:
    """Forms the group; every member must do so at about the same time.

    Broadcasts, also between two: gloo's sending and receiving move nothing until someone waits, so that nothing could
    be done beside it.

    gloo cannot call a transfer off. Its own group, as it goes, waits for one that has no other end, up to the time-out, and
    so would an exception's way out or the process's end. So nothing but `close` lets it go, and only if all is over;
    otherwise it is called off where the library can do that, and stays until the process ends, which waits for nobody.
    """

    def __init__(
        self, channel: StoreChannel, rank: int, size: int, platform: Platform, name: str = "group", client: Any = None
    ) -> None:
        """`platform`: of whose memory buckets are; the CPU's for the host's. `name` tells the session's groups apart.
        `client`: of the session's store, for groups that form one after the other; it cannot be the channel's, since forming
        blocks inside it and the channel must stay free to notice an abort."""
        self._channel, self._platform = channel, platform
        session = channel.session
        store = dist.PrefixStore(session.key(name), client or session.open_store())
        made: list[Any] = []
        failed: list[BaseException] = []

        def form() -> None:
            try:
                if device.index is not None:  # which device a thread is on is its own affair
                    platform.set_device(device.index)
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                made.append(platform.collective(store, rank, size, timedelta(seconds=session.timeout)))
                first = _broadcast(made[0], byte)  # libraries of devices connect with it, and block meanwhile
                while not first.is_completed():
                    time.sleep(_POLL_SECONDS)
                first.wait()
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                failed.append(error)

        device = platform.device()  # of this thread
        library = platform.kind.collective
        interface = next(iter(platform.kind.interface_variables), "GLOO_SOCKET_IFNAME")
        thread = threading.Thread(target=form, name="megarl-connect", daemon=True)
        thread.start()
        try:
            channel.wait_until(
                lambda: not thread.is_alive(), lambda: f"the {library} group of {size} processes to form (rank {rank})"
            )
        except WeightSyncError:
            for group in made:
                platform.abort_collective(group)
            raise
        if failed:
            raise WeightSyncError(
                f"the {library} group of {size} processes could not form (rank {rank}): {failed[0]}. "
                f"Check that the hosts reach each other; {interface} selects the network interface"
            ) from failed[0]
        self._group = made[0]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._under_way: list[Any] = []

    def start(self, memory: torch.Tensor) -> Any:
        """Begin to broadcast rank 0's `memory` (uint8, on the platform's device) into everyone's. `finish` ends it."""
        work = _broadcast(self._group, memory)
        self._under_way = [*(one for one in self._under_way if not one.is_completed()), work]
        return work

    def finish(self, work: Any, awaited: str) -> None:
        """Wait for a broadcast. Raises WeightSyncError where a member died, fell silent or aborted."""
        self._channel.wait_until(work.is_completed, lambda: awaited)
        try:
            work.wait()  # the errors; and the stream of this thread goes on behind the broadcast
        except RuntimeError as error:
            told = time.monotonic() + CAUSE_SECONDS  # of whoever is gone, the session tells more
            self._channel.wait_until(lambda: time.monotonic() > told, lambda: awaited)
            raise WeightSyncError(f"{awaited} failed: {error}") from error

    def close(self) -> None:
        """Waits for nothing; whoever else is part of what is under way hears of its end in another way. May be called twice."""
        if self._group is not None:
            if all(work.is_completed() for work in self._under_way):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            else:
                self._platform.abort_collective(self._group)
        self._group, self._under_way = None, []


def _broadcast(group: Any, memory: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([memory], options)
