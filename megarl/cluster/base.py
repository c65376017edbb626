"""What the controller sees of other processes: one face, whatever carries the calls.

Classes are named by import path, ``"package.module:Class"``: the controller imports neither trainers
nor engines, and each process can be given its environment before their modules are imported.
"""

from __future__ import annotations

import importlib
import socket
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.types import DataRef


class WorkerGroup(Protocol):
    """Trainer processes, one a device, behind a class whose methods all ranks run together (SPMD).

    Every call raises `WorkerFailed` when a rank raises or dies, and `ServiceDied` when an engine
    process dies meanwhile; everything that the cluster started has ended by then.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run ``method(*args)`` on every rank; the results in rank order."""
        ...

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        """Run ``method(*per_rank[r])`` on each rank r; the results in rank order."""
        ...

    def scatter_with_data(
        self, method: str, per_rank: list[tuple[Any, ...]], parts: int
    ) -> list[tuple[Any, list[DataRef]]]:
        """`scatter` for a method that returns ``(control, parts lists of vectors)``: of each rank ``(control,
        parts DataRefs)``, and the vectors stay out of the controller where they can."""
        ...

    def shutdown(self) -> None:
        """Call the class's ``shutdown()`` where it has one, then end the processes."""
        ...


class Service(Protocol):
    """A process of its own around one object, answering many calls at once from one asyncio loop.

    A process starts in the background: calls wait until its object is constructed. A plain method
    runs on the loop and holds it; an ``async def`` method leaves it to others while it awaits.
    A call that raises gives a `CallFailed`; a process that is gone, or whose constructor raised,
    gives `ServiceDied` to this and every later call.
    """

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str:
        """Name of the machine that it runs on, for people. Waits for the process."""
        ...

    @property
    def address(self) -> str:
        """Its machine's address, as processes on the others reach it."""
        ...

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def call_with_data(self, method: str, *args: Any) -> Future[Any]:
        """For a method that returns ``(control, list[SampleTokens])``: the future's result is
        ``(control, DataRef)``, and the token vectors stay out of the controller where they can."""
        ...

    def alive(self) -> bool: ...

    def stop(self) -> None:
        """Call the object's ``shutdown()`` where it has one, then end the process and its children."""
        ...


class Cluster(Protocol):
    """Starts processes, and ends all of them: use it in a ``with``."""

    def start_trainers(
        self, class_path: str, size: int, args: tuple[Any, ...], env: dict[str, str], name: str = "trainer"
    ) -> WorkerGroup:
        """`size` processes that each construct ``class_path(*args)``. `name`: the group's, "trainer" or "critic".

        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before the
        class is imported, as torchrun sets them; LOCAL_RANK counts within the devices that are visible.
        `env` is added to the environment of every rank. `size` is that of the recipe's cluster.trainers, or
        critic.trainers.
        """
        ...

    def start_service(
        self, class_path: str, args: tuple[Any, ...], *, name: str, devices: int, env: dict[str, str]
    ) -> Service:
        """A process with `devices` devices of one machine visible, that constructs ``class_path(*args)``.

        Services are the engines that were connected for, in order: rollout.engines, of rollout.tensor_parallel
        devices each, which spread over the trainers' devices where they share these; then the teacher's
        and the judge's.
        """
        ...

    def check(self) -> None:
        """Raise `WorkerFailed` or `ServiceDied` where something that was started here has died, or could not
        be started; everything else has ended by then.

        For a controller that waits for something else than trainers: these are asked too. Takes some
        milliseconds, so that it can be called every second, from the thread that calls the trainers.
        """
        ...

    def shutdown(self) -> None:
        """End everything that was started here. Idempotent."""
        ...

    def __enter__(self) -> Cluster: ...

    def __exit__(self, *exc: object) -> None: ...


def load_class(path: str) -> type:
    """The class that ``"package.module:Class"`` names. Raises ValueError for another form or name."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{path!r} does not name a class: write package.module:Class.")
    loaded = getattr(importlib.import_module(module), name, None)
    if not isinstance(loaded, type):
        raise ValueError(f"{path!r} names no class: module {module} has no class {name}.")
    return loaded


def host_name() -> str:
    """Name of this machine, for people."""
    return socket.gethostname()
