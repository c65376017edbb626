"""Rank processes of a stage: child processes on this machine, or Ray actors on all nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any

from megarl import platform as platforms
from megarl.cluster.base import WorkerGroup
from megarl.cluster.process import free_port
from megarl.cluster.torchrun.local_service import LocalService
from megarl.commands.accept.context import StageContext
from megarl.platform.environment import users_first

COLLECTIVE_SECONDS = 120.0  # time limit of a collective
GRACE = 3.0  # seconds to wait for the other ranks' errors after the first one


class LocalRanks:
    """Ranks on this machine. They end with `close`."""

    def __init__(self, folder: Path, class_path: str, args: tuple[Any, ...], size: int, env: dict[str, str]) -> None:
        common = {
            **env,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.services = []
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(size):
            rank_env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = folder / f"rank-{rank}.log"
            self.services.append(LocalService(class_path, args, name=f"rank {rank}", log=log, env=rank_env))

    @property
    def size(self) -> int:
        return len(self.services)

    def begin(self, method: str, *args: Any) -> list[Future[Any]]:
        """Start the call on all ranks and return the futures."""
        return [service.call(method, *args) for service in self.services]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks and return the results in rank order.

        Raises RuntimeError with the first cause if a rank raised or died.
        """
        calls = self.begin(method, *args)
        _, pending = wait(calls, return_when=FIRST_EXCEPTION)
        if pending:
            wait(pending, timeout=GRACE)
        errors = [call.exception() for call in calls if call.done() and call.exception() is not None]
        if errors:
            # A rank that lost its connection to a failed rank is not the cause.
            cause = min(errors, key=lambda error: _is_about_a_peer(str(error)))
            print(getattr(getattr(cause, "failure", None), "traceback", None) or "", flush=True)
            raise RuntimeError(str(cause))
        return [call.result() for call in calls]

    def close(self) -> None:
        stop_all(self.services)


Ranks = LocalRanks | WorkerGroup
"""Processes with one object each. `call` calls a method on all of them."""


def stop_all(services: Sequence[LocalService]) -> None:
    """Stop processes at the same time."""
    for service in services:
        service.begin_stop()
    for service in services:
        service.stop()


def _is_about_a_peer(text: str) -> bool:
    return any(
        words in text
        for words in ("Connection closed by peer", "Connection reset", "Timed out waiting", "remote process")
    )


def rank_environment(context: StageContext, *, deterministic: bool = False) -> dict[str, str]:
    """Return the environment of a trainer process, as in a run."""
    platform = platforms.select(context.device)
    variables = platform.trainer_env(COLLECTIVE_SECONDS) | (platform.deterministic_env() if deterministic else {})
    return {"OMP_NUM_THREADS": "1" if context.tiny else "4", **users_first(variables)}


@contextlib.contextmanager
def local_ranks(
    context: StageContext, class_path: str, size: int, *args: Any, name: str = "ranks", deterministic: bool = False
) -> Iterator[LocalRanks]:
    """Start `size` processes on this machine that each construct `class_path(device, *args)`, with logs in `name`."""
    env = rank_environment(context, deterministic=deterministic)
    ranks = LocalRanks(context.folder / name, class_path, (context.device, *args), size, env)
    try:
        yield ranks
    finally:
        ranks.close()


@contextlib.contextmanager
def all_ranks(context: StageContext, class_path: str, *args: Any, name: str = "ranks") -> Iterator[Ranks]:
    """Start a process on every device of every node."""
    if context.settings.nodes == 1:
        with local_ranks(context, class_path, context.devices, *args, name=name) as ranks:
            yield ranks
        return
    from megarl.cluster import connect
    from megarl.cluster.device_map import Demand
    from megarl.recipe.schema import Recipe

    recipe = Recipe()
    recipe.cluster.device, recipe.cluster.transport = context.device, "ray"  # type: ignore[assignment]
    recipe.cluster.ray_address, recipe.cluster.trainers = context.settings.ray_address, context.devices
    recipe.runs_dir, recipe.name = str(context.folder), name
    demand = Demand.of(recipe, trainers=True, engines=False)
    with connect(recipe, platforms.select(context.device), demand) as cluster:
        yield cluster.start_trainers(class_path, context.devices, (context.device, *args))
