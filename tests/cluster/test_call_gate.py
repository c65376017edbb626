"""Calls to a service: which failures count as attempts, who waits during an outage, and who tests the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.cluster import outages
from megarl.cluster.call_gate import CallGate, CallGates, url_without_secrets
from megarl.errors import Unavailable


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_WAIT", 0.02)


class Server:
    """A service that answers a call with its row. It fails while it is down, and always for `bad` rows."""

    def __init__(self, *bad: str) -> None:
        self.bad, self.down, self.calls = set(bad), False, list[str]()

    def request(self, row: str) -> Callable[[], Awaitable[str]]:
        async def attempt() -> str:
            self.calls.append(row)
            await asyncio.sleep(0)
            if self.down or row in self.bad:
                raise Unavailable("it answered 503" if self.down else f"it cannot read {row}")
            return row

        return attempt

    async def health(self) -> None:
        self.calls.append("health")
        if self.down:
            raise Unavailable("no connection")

    def go_down(self, seconds: float) -> None:
        self.down = True
        asyncio.get_running_loop().call_later(seconds, self.come_back)

    def come_back(self) -> None:
        self.down = False


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 20))


async def outcome(gate: CallGate, server: Server, row: str, attempts: int = 3) -> str:
    try:
        result, failures = await gate.call(row, server.request(row), attempts)
    except Unavailable as error:
        return f"{row} failed {error.failures} times: {error}"
    return f"{result} after {failures}"


@pytest.mark.parametrize("kind", ["repeats", "health", "calls"])
def test_an_outage_costs_no_call(kind: str) -> None:
    """Without a health check or an answered call the waiting calls themselves test the service."""

    async def test() -> tuple[list[str], Server]:
        server = Server()
        gate = CallGate("it", server.health if kind == "health" else None, repeats=kind == "repeats")
        assert await outcome(gate, server, "row/0") == "row/0 after 0"
        server.go_down(0.5)
        outcomes = await asyncio.gather(*(outcome(gate, server, f"row/{number}", 1) for number in range(1, 21)))
        return outcomes, server

    outcomes, server = run(test)
    # Each may be the call that tests the service, once in each round.
    assert [each.partition(" after ")[0] for each in outcomes] == [f"row/{number}" for number in range(1, 21)]
    failures = [int(each.partition(" after ")[2]) for each in outcomes]
    assert max(failures) <= (2 if kind == "calls" else 1)
    assert len(server.calls) < 20 + 1 + 20 + 12, "a service that is down gets few requests"


def test_a_row_that_the_service_cannot_answer_fails_alone() -> None:
    async def test() -> tuple[list[str], int]:
        server, gates = Server("row/3"), CallGates()
        gate = gates.of("it", repeats=True)
        rows = [f"row/{number}" for number in range(6)]
        outcomes = await asyncio.gather(*(outcome(gate, server, row) for row in rows))
        return outcomes, gates._changes

    outcomes, changes = run(test)
    assert outcomes[3] == "row/3 failed 3 times: it cannot read row/3" and changes == 0
    assert [each for each in outcomes if "after 0" in each] == [*outcomes[:3], *outcomes[4:]]


def test_bad_rows_alone_do_not_bring_down_a_service_that_answers_others() -> None:
    """Two rows fail in a row, which looks like an outage. The calls that test the service show that it is none, and the bad
    rows fail after their attempts instead of waiting for ever."""

    async def test() -> list[str]:
        server, gate = Server("row/1", "row/2"), CallGate("it")
        bad = [asyncio.ensure_future(outcome(gate, server, row)) for row in ("row/1", "row/2")]
        for number in range(3, 200):
            if all(each.done() for each in bad):
                break
            assert await outcome(gate, server, f"row/{number}") == f"row/{number} after 0"
            await asyncio.sleep(0.01)
        return [each.result() for each in bad]

    outcomes = run(test)
    assert all("failed" in each and "it cannot read" in each for each in outcomes), outcomes


def test_a_call_without_others_fails_after_its_attempts() -> None:
    """A single row does not show an outage."""

    async def test() -> str:
        server = Server("row/1")
        return await outcome(CallGate("it"), server, "row/1", attempts=4)

    assert run(test) == "row/1 failed 4 times: it cannot read row/1"


def test_a_fault_of_a_tool_stops_no_other_call() -> None:
    class Fault(Unavailable):
        is_outage = False

    async def test() -> list[Any]:
        gate = CallGate("it")

        async def attempt() -> str:
            raise Fault("its answer is invalid")

        calls = [gate.call(f"row/{number}", attempt, 2) for number in range(4)]
        faults = await asyncio.gather(*calls, return_exceptions=True)
        assert gate.outage() is None
        return faults

    assert [str(each) for each in run(test)] == ["its answer is invalid"] * 4


def test_other_exceptions_pass() -> None:
    async def test() -> None:
        async def attempt() -> str:
            raise ZeroDivisionError

        await CallGate("it").call("row", attempt, 3)

    with pytest.raises(ZeroDivisionError):
        run(test)


def test_a_cancelled_call_does_not_stop_the_tests_of_the_service() -> None:
    """The oldest waiting call is cancelled, as after the failure of an engine: the next one tests the service."""

    async def test() -> list[str]:
        server, gate = Server(), CallGate("it")
        server.go_down(0.3)
        calls = [asyncio.ensure_future(outcome(gate, server, f"row/{number}", 9)) for number in range(4)]
        await asyncio.sleep(0.1)
        for call in calls[:3]:
            call.cancel()
        return [await calls[3]]

    assert "row/3 after" in run(test)[0]


def test_each_outage_is_reported_once_and_its_end_too() -> None:
    async def test() -> list[tuple[int, list[tuple[str, str]]]]:
        server, gates, reports = Server(), CallGates(), []
        gate = gates.of("it", repeats=True)
        assert gates.of("it") is gate
        await outcome(gate, server, "row/0")
        for _ in range(2):
            server.go_down(0.2)
            calls = asyncio.gather(*(outcome(gate, server, f"row/{number}") for number in range(8)))
            for _ in range(2):
                seen, outages = await gates.outages(reports[-1][0] if reports else 0)
                reports.append((seen, [(each.service, each.cause) for each in outages]))
                assert all(0 <= each.seconds < 1 for each in outages)
            await calls
        waiting = asyncio.ensure_future(gates.outages(reports[-1][0]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gates.close()
        await waiting
        return reports

    down = [("it", "it answered 503")]
    assert run(test) == [(1, down), (2, []), (3, down), (4, [])]


def test_no_secret_of_a_url_is_shown() -> None:
    url = "https://me:s3cr3t@judge.example.com:8443/score?key=s3cr3t#s3cr3t"
    assert url_without_secrets(url) == "https://judge.example.com:8443/score"
