"""Calls to services outside the run, from a rollout process: they wait while the service is down (`outages`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megarl.cluster.outages import Outage, OutageState, wait_before
from megarl.errors import Unavailable

T = TypeVar("T")
Probe = Callable[[], Awaitable[Any]]
"""A request that shows whether a service is up. Raises an exception if it is not."""


class CallGate:
    """Calls to one service. Belongs to one event loop.

    While the service is down, calls wait. Probes test it: `probe`, or with `repeats` the last call that it has answered, else
    the calls that wait, one after the other.
    """

    def __init__(
        self,
        service: str,
        probe: Probe | None = None,
        *,
        repeats: bool = False,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`repeats`: a call may be repeated without an effect on samples. `on_change`: called when the service goes down or is
        back. `clock`: seconds."""
        self.service = service
        self._probe, self._repeats, self._on_change, self._clock = probe, repeats, on_change, clock
        self._state = OutageState()
        self._waiting: deque[asyncio.Future[bool]] = deque()  # calls; True: this call tests the service
        self._one_check = asyncio.Lock()
        self._probing: asyncio.Task[None] | None = None  # while the service is down

    async def call(
        self,
        row: str,
        attempt: Callable[[], Awaitable[T]],
        attempts: int,
        is_answer: Callable[[T], bool] = lambda result: True,
    ) -> tuple[T, int]:
        """Return the result of `attempt`, and how many attempts have failed before.

        `is_answer`: False for a result that does not show that the service is up. Failures of an outage do not count as attempts;
        a failure counts if the service has answered others since the call failed last. Raises the last `Unavailable`, with
        `failures` set, after `attempts` failures that count.
        """
        failures = counted = 0
        failed_at = math.inf
        while True:
            await self._wait_until_up()
            began = self._clock()
            try:
                result = await attempt()
            except Unavailable as error:
                failures += 1
                answers_others, failed_at = self._state.answered_at > failed_at, self._clock()
                await self._fail(row, error, began)
                if not self._state.is_down and (self._probe is None or counted + 1 < attempts):
                    await asyncio.sleep(wait_before(counted))  # meanwhile, calls for other rows may show an outage
                if error.is_outage and self._state.is_down and not answers_others:
                    continue
                counted += 1
                if counted >= attempts:
                    error.failures = failures
                    raise
            else:
                if is_answer(result):
                    if self._repeats:
                        self._probe = _repetition(attempt, is_answer)
                    self._answer()
                return result, failures

    def outage(self) -> Outage | None:
        """Return the service's outage; None if it is up."""
        return self._state.outage(self.service, self._clock())

    def _answer(self) -> None:
        self._state.answer(self._clock())
        if self._probing is None:
            return
        if self._probing is not asyncio.current_task():
            self._probing.cancel()
        self._probing = None
        while self._waiting:
            _set_turn(self._waiting.popleft(), False)
        self._on_change()

    async def _fail(self, row: str, error: Unavailable, began: float) -> None:
        if not error.is_outage:
            return
        failed_at, has_probe = self._clock(), self._probe is not None
        self._state.fail(row, str(error), began, failed_at, after=error.after, has_probe=has_probe)
        if self._probe is not None and not self._state.is_down:
            async with self._one_check:  # calls that fail together need one probe
                if not self._state.is_down and self._state.answered_at < failed_at:
                    await self._run_probe(self._probe)
        if self._state.is_down and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe_until_up())
            self._on_change()

    async def _probe_until_up(self) -> None:
        while self._state.is_down:
            await asyncio.sleep(self._state.seconds_to_probe(self._clock()))
            if not self._state.is_down:
                return
            self._state.begin_probe(self._clock())
            if self._probe is not None:
                await self._run_probe(self._probe)
            elif self._waiting:
                _set_turn(self._waiting.popleft(), True)

    async def _run_probe(self, probe: Probe) -> None:
        began = self._clock()
        try:
            await probe()
        except Exception as error:  # noqa: BLE001 -- the notice of the outage names it
            self._state.fail_probe(str(error) or type(error).__name__, began, self._clock())
        else:
            self._answer()

    async def _wait_until_up(self) -> None:
        """Return when the service is up, or when this call shall test it."""
        while self._state.is_down:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            if await turn:
                return


class CallGates:
    """The gates of a rollout process, by service."""

    def __init__(self) -> None:
        self._gates: dict[str, CallGate] = {}
        self._changes = 0  # number of times that a service went down or came back
        self._changed = asyncio.Event()

    def of(self, service: str, probe: Probe | None = None, *, repeats: bool = False) -> CallGate:
        """Return the gate of `service`, and create it if it is new. The other arguments: see `CallGate`."""
        if service not in self._gates:
            self._gates[service] = CallGate(service, probe, repeats=repeats, on_change=self._change)
        return self._gates[service]

    async def outages(self, seen: int) -> tuple[int, list[Outage]]:
        """Return the number of changes so far and the outages, as soon as this number is not `seen`."""
        while self._changes == seen:
            self._changed.clear()
            await self._changed.wait()
        outages = [outage for gate in self._gates.values() if (outage := gate.outage()) is not None]
        return self._changes, outages

    def close(self) -> None:
        """Let a call of `outages` that waits return."""
        self._change()

    def _change(self) -> None:
        self._changes += 1
        self._changed.set()


def url_without_secrets(url: str) -> str:
    """Return a URL without name, password, query and fragment, for messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _repetition(attempt: Callable[[], Awaitable[T]], is_answer: Callable[[T], bool]) -> Probe:
    async def repeat() -> None:
        result = await attempt()
        if not is_answer(result):
            raise Unavailable(f"a request that it has answered before now fails: {result}")

    return repeat


def _set_turn(turn: asyncio.Future[bool], tests: bool) -> None:
    if not turn.done():  # else the call was cancelled
        turn.set_result(tests)
