"""Waits for engines that start look at the processes meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from megarl.cluster.failures import Failure, ProcessInfo, ServiceDied
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.start_engines import wait_for_start, wait_until_asleep
from tests.support.dying_engines import Service


def test_an_engine_that_is_stopped_while_it_loads_ends_the_wait() -> None:
    """It would be noticed only after `rollout.start_timeout`."""
    engine: Any = EngineHandle(Service(0))  # type: ignore[arg-type]
    never: Future[Any] = Future()

    def check() -> None:
        raise ServiceDied(Failure(ProcessInfo("service engine0", "host", 7), "its process has been stopped for 20 s"))

    with pytest.raises(ServiceDied, match="has been stopped"):
        wait_for_start([engine], [never], doing="load", limit=30.0, check=check)
    with pytest.raises(ServiceDied, match="has been stopped"):
        wait_until_asleep([engine], [never], 30.0, check)
