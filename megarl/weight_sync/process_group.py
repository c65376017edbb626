"""Groups of two processes that carry buckets over a network: rank 0 holds them, rank 1 receives them on another host.

They use gloo from host memory, on every platform and independently of the training's collective library; or the device's
library, from device memory to device memory.
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

CAUSE_SECONDS = 1.0  # time for the cause of a broken connection to reach the session
_POLL_SECONDS = 0.001


class BroadcastGroup:
    """A process group for broadcasts. The constructor forms it, so all peers must call it at about the same time.

    Broadcasts serve even between two: gloo's send and receive progress only during a wait, and so cannot overlap with work.

    gloo cannot cancel a transfer. Destroying its group, at scope exit, in an exception or at process exit, blocks on a
    transfer without a peer until the timeout. So an extra reference keeps the group alive, and `close` drops it only if all
    transfers are complete. Otherwise `close` aborts the group, if the library can; the group then lives until the process
    ends, which does not wait for it.
    """

    def __init__(
        self, channel: StoreChannel, rank: int, size: int, platform: Platform, name: str = "group", client: Any = None
    ) -> None:
        """`platform`: of the buckets' memory; the CPU's for host memory. `name`: unique in the session.

        `client`: a client of the session's store, shared by groups that form one after the other. It must not be the
        channel's: forming blocks inside it, and the channel must remain free to detect an abort.
        """
        self._channel, self._platform = channel, platform
        session = channel.session
        store = dist.PrefixStore(session.key(name), client or session.open_store())
        formed: list[Any] = []
        errors: list[BaseException] = []

        def form() -> None:
            try:
                if device.index is not None:  # the current device is per thread
                    platform.set_device(device.index)
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                formed.append(platform.collective(store, rank, size, timedelta(seconds=session.timeout)))
                first = _broadcast(formed[0], byte)  # device libraries connect here, and block
                while not first.is_completed():
                    time.sleep(_POLL_SECONDS)
                first.wait()
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                errors.append(error)

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
            for group in formed:
                platform.abort_collective(group)
            raise
        if errors:
            raise WeightSyncError(
                f"the {library} group of {size} processes could not form (rank {rank}): {errors[0]}. "
                f"Check that the hosts reach each other; {interface} selects the network interface"
            ) from errors[0]
        self._group = formed[0]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._in_flight: list[Any] = []

    def start(self, memory: torch.Tensor) -> Any:
        """Start a broadcast of rank 0's `memory` (uint8, on the platform's device). `finish` completes it."""
        work = _broadcast(self._group, memory)
        self._in_flight = [*(transfer for transfer in self._in_flight if not transfer.is_completed()), work]
        return work

    def finish(self, work: Any, awaited: str) -> None:
        """Wait for a broadcast. Raises WeightSyncError if a peer died, stopped or aborted."""
        self._channel.wait_until(work.is_completed, lambda: awaited)
        try:
            work.wait()  # raises its error, and orders this thread's stream after it
        except RuntimeError as error:
            deadline = time.monotonic() + CAUSE_SECONDS  # the session may name the dead peer: that error is better
            self._channel.wait_until(lambda: time.monotonic() > deadline, lambda: awaited)
            raise WeightSyncError(f"{awaited} failed: {error}") from error

    def close(self) -> None:
        """Release the group without waiting. Peers of unfinished transfers learn of it from the session. May be called twice."""
        if self._group is not None:
            if all(work.is_completed() for work in self._in_flight):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            else:
                self._platform.abort_collective(self._group)
        self._group, self._in_flight = None, []


def _broadcast(group: Any, memory: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([memory], options)
