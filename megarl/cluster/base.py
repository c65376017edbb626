"""Interfaces of a cluster, its trainer groups and its services, independent of the transport (Ray or torchrun).

Worker classes are passed as import paths, ``"package.module:Class"``: the controller imports neither trainers
nor engines, and each process sets its environment before it imports their modules.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from megarl.platform.installed import paused_collector
from megarl.types import DataRef

if TYPE_CHECKING:
    from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
    from megarl.cluster.stacks.report import GroupStacks


class WorkerGroup(Protocol):
    """Trainer processes, one per device; all ranks run each method together (SPMD).

    Every call raises `WorkerFailed` when a rank raises or dies, and `ServiceDied` when an engine
    process dies during the call. The cluster ends all its processes before it raises, unless the group is not `essential`
    (`Cluster.start_trainers`).
    """

    failure: WorkerFailed | None
    """In a group that is not essential: the death of an idle rank, which `Cluster.check` has found."""
    kept: bool
    """The processes have served an earlier controller, which has died (`train.keep_workers`)."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run ``method(*args)`` on every rank and return the results in rank order."""
        ...

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        """Run ``method(*per_rank[r])`` on each rank r and return the results in rank order."""
        ...

    def scatter_with_data(
        self, method: str, per_rank: Sequence[tuple[Any, ...] | None], parts: int
    ) -> list[tuple[Any, list[DataRef]] | None]:
        """Run `scatter` for a method that returns ``control`` and `parts` lists of vectors. Ranks with None are not called.

        Returns ``(control, DataRefs)`` per rank, with `parts` DataRefs; None if it was not called. Over Ray, vectors above Ray's
        limit of 100 KB never pass through the controller.
        """
        ...

    def shutdown(self) -> None:
        """Call the class's ``shutdown()`` if it has one, then end the processes."""
        ...


class Service(Protocol):
    """A process that hosts one object and serves many calls at once from one asyncio loop.

    The process starts in the background: calls wait until its object is constructed. A plain method blocks the
    loop while it runs; an ``async def`` method yields the loop while it awaits.
    A call that raises fails with `CallFailed`. If the process has ended or its constructor raised, this call and
    every later call fail with `ServiceDied`.
    """

    stopping: bool  # its orderly end was requested
    kept: bool  # it has served an earlier controller, which has died (`train.keep_workers`)

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str:
        """Host name of its machine, for messages. Waits for the process to start."""
        ...

    @property
    def known_place(self) -> ProcessInfo:
        """The process, for messages, as far as it is known without waiting: before its start, the machine's address and the log."""
        ...

    @property
    def address(self) -> str:
        """Address of its machine that processes on other machines can reach."""
        ...

    @property
    def device_names(self) -> str:
        """Numbers of its devices on its machine, such as "4,5"; "" if it needs none."""
        ...

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def call_with_data(self, method: str, *args: Any) -> Future[Any]:
        """Call a method that returns ``(control, list[SampleTokens])``; the future's result is ``(control, DataRef)``.

        Over Ray the token vectors never pass through the controller.
        """
        ...

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        """Call ``method(parts)``, which returns ``(control, vectors)``: at most `parts` lists of SampleTokens. The future's result
        is ``(control, list[DataRef])``, with one DataRef per list.
        """
        ...

    def failure(self) -> Failure | None:
        """Return how the process ended or failed to start; None while it is alive."""
        ...

    def alive(self) -> bool: ...

    def stop(self) -> None:
        """Call the object's ``shutdown()`` if it has one, then end the process and its children."""
        ...


LeaveCheck = Callable[[list[Service]], str | None]
"""Receives the services of a machine, and returns why they cannot leave, if they cannot."""


class Cluster(Protocol):
    """Starts processes and ends all of them when its ``with`` block is left."""

    requests: dict[str, Callable[[list[str]], Any]]
    """Functions that answer other processes of this user, by the first word of the request (`answering_requests`). They are
    called in threads with the other words, and return plain values."""
    not_taken: list[str]
    """For each worker of an earlier controller that does not go on in spite of `train.keep_workers`: its name, and why."""

    def start_trainers(
        self,
        class_path: str,
        size: int,
        args: tuple[Any, ...],
        name: str = "trainer",
        *,
        essential: bool = True,
        settings: str = "",
    ) -> WorkerGroup:
        """Start `size` processes that each construct ``class_path(*args)``. `name`: "trainer" or "critic".

        essential: the run cannot continue without them. Otherwise a failure leaves the other processes alone, and
        `end_trainers` and this method start the group again, on the same devices.

        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them,
        before the class is imported; LOCAL_RANK indexes the visible devices.
        `size` must equal cluster.trainers or critic.trainers.

        settings: `megarl.cluster.keeper.digest_of` all that decides the work of the processes. Processes of an earlier controller
        with equal settings are taken instead of new ones, if a keeper has kept all of them; "": never.
        """
        ...

    def end_trainers(self) -> None:
        """Kill the processes of all trainer groups, and wait for their end, since they hold device memory.

        Raises ProcessFailure if processes of this machine have not ended after a minute. torchrun cannot start them again.
        """
        raise AssertionError(f"{type(self).__name__} cannot end its trainers alone")

    def start_service(
        self,
        class_path: str,
        args: tuple[Any, ...],
        *,
        name: str,
        devices: int,
        env: dict[str, str],
        replaces: Service | None = None,
        essential: bool = True,
        additional: bool = False,
        settings: str = "",
    ) -> Service:
        """Start a process that sees `devices` devices of one machine and constructs ``class_path(*args)``.

        replaces: an earlier service. Its process is killed if it still runs, and the new one takes its devices. If its machine has left
        the cluster, the new one takes free devices of another; raises MachineLost if there are none. essential: the run
        cannot continue without it, so that `check` raises if it ends. A stopped process (SIGSTOP) that is not essential is killed.
        additional: beyond the reservation; it takes free devices of a machine, and raises MachineLost if there are none.
        settings: as in `start_trainers`. The object needs a method ``release()``, which ends all that an earlier controller has
        requested, and returns whether the object can serve another one.

        Start the engines in the order of the reservation: rollout.engines, of rollout.tensor_parallel devices each
        (colocated engines spread over the trainers' devices), then the engines of the teacher and of the judge.
        """
        ...

    def release_service(self, service: Service) -> None:
        """End a service, and give its devices back: an additional one, or another job, may take them.

        With torchrun the number of services is fixed.
        """
        raise AssertionError(f"{type(self).__name__} cannot give devices back")

    def free_services(self, devices: int) -> int | None:
        """Return how many additional services of `devices` devices may start; None: any number, since they need no devices.
        Callable from any thread."""
        return 0

    def leave_machine(self, rank: int, agree: LeaveCheck) -> tuple[list[Service], str | None]:
        """Start no further process on the machine with this node rank of launch/multinode.sh, which leaves the cluster.

        Returns the services there, none if the machine has left, and why the machine cannot leave while the run goes on, if it
        cannot. When it has no service left, the data that its services have returned are stored on this machine. agree: the last check.
        Callable from any thread, and again.
        """
        return [], "the processes of this run are on one machine"

    def check(self) -> None:
        """Raise `WorkerFailed` or `ServiceDied` if a process has died or failed to start, after ending all others. Trainers and
        services that are not essential are left out.

        Also pings idle trainers. Call it about every second while waiting for anything other than trainers, from
        the thread that calls the trainers; it takes a few milliseconds.
        """
        ...

    def on_check(self, callback: Callable[[], None]) -> None:
        """Call `callback` in each check, in the controller's thread, also while trainers compute. It may raise `ServiceDied`."""
        ...

    def stacks(self) -> list[GroupStacks]:
        """Read the stacks of all trainers and services, the services last. Takes seconds. Callable from any thread."""
        ...

    def shutdown(self) -> None:
        """End all processes of this cluster. Idempotent."""
        ...

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def load_class(path: str) -> type:
    """Import and return the class at ``"package.module:Class"``. Raises ValueError if the path is malformed or unknown."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{path!r} is not the path of a class: write package.module:Class.")
    with paused_collector():
        loaded = getattr(importlib.import_module(module), name, None)
    if not isinstance(loaded, type):
        raise ValueError(f"{path!r} does not exist: module {module} has no class {name}.")
    return loaded


def host_name() -> str:
    """Host name of this machine, for messages."""
    return socket.gethostname()
