"""Scorers with a service that is down for a while: a real server that fails, hangs, or is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.call_gate import CallGates
from megarl.recipe.remote import RemoteConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards import Score, ScoreRequest
from megarl.rewards.scoring import ATTEMPTS, Outcome, Scoring
from megarl.rewards.weighted import terms_of
from megarl.types import SampleFailure
from tests.support.flaky_service import FlakyService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FlakyService]:
    service = FlakyService(tmp_path)
    yield service
    service.kill()


def row(number: int, response: str = "four") -> ScoreRequest:
    return ScoreRequest(response, "4", "mine", uid=f"row/{number}")


class Scored:
    """Scoring by `service`, with its outages. `test` runs while samples can be scored."""

    def __init__(self, service: FlakyService) -> None:
        remote = RemoteConfig(f"{service.url}?key=s3cr3t", timeout=0.4, attempts=2, first_wait=0.05, longest_wait=0.1)
        settings = RewardConfig(function="remote", processes=1, retries=0, remote=remote)
        self.service, self.gates = service, CallGates()
        self.scoring = Scoring(terms_of(settings.function, {}, ["mine"]), settings, gates=self.gates)

    def run(self, test: Callable[[], Awaitable[Any]]) -> Any:
        self.scoring.start()
        try:
            return asyncio.run(asyncio.wait_for(test(), 40))
        finally:
            self.scoring.close()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """Score the requests at once, each as a group."""
        groups = await asyncio.gather(*(self.scoring.score([request]) for request in requests))
        return [outcome for group in groups for outcome in group]


@contextlib.contextmanager
def killed(service: FlakyService) -> Iterator[None]:
    service.kill()
    yield
    service.start()


@pytest.mark.parametrize("fault", ["503", "500", "hang", "killed"])
def test_samples_wait_for_a_service_that_is_down(service: FlakyService, fault: str) -> None:
    """Also a single sample: the service does not answer a request that it has answered before."""
    scored = Scored(service)

    async def test() -> tuple[list[Outcome], list[Any]]:
        assert await scored.score([row(0)]) == [(Score(4.0), 0)]
        with killed(service) if fault == "killed" else service.failing(fault):
            waiting = asyncio.ensure_future(scored.score([row(1)]))
            seen, down = await scored.gates.outages(0)
            late = asyncio.ensure_future(scored.score([row(number) for number in range(2, 12)]))
            await asyncio.sleep(1.5)
            assert not waiting.done() and not late.done()
        outcomes = [*await waiting, *await late]
        return outcomes, [*down, *(await scored.gates.outages(seen))[1]]

    outcomes, (outage,) = scored.run(test)
    assert [score for score, _ in outcomes] == [Score(4.0)] * 11
    assert [retries for _, retries in outcomes[1:]] == [0] * 10, "during the outage no further sample is sent"
    assert outage.service == service.url, "without the secret"
    causes = {"hang": "no answer within 0.4 s", "killed": "no connection: "}
    assert outage.cause.startswith(causes.get(fault, f"it answered {fault}"))


def test_a_service_that_is_down_from_the_start_is_recognized_by_two_rows(service: FlakyService) -> None:
    scored = Scored(service)

    async def test() -> list[Outcome]:
        with killed(service):
            waiting = asyncio.ensure_future(scored.score([row(number) for number in range(4)]))
            _, (outage,) = await scored.gates.outages(0)
            assert outage.service == service.url
        return await waiting

    assert [score for score, _ in scored.run(test)] == [Score(4.0)] * 4


def test_a_sample_that_the_service_cannot_score_fails_alone_and_soon(service: FlakyService) -> None:
    scored = Scored(service)

    async def test() -> list[Outcome]:
        await scored.score([row(0)])
        return await scored.score([row(1), row(2, "bad"), row(3)])

    began = time.monotonic()
    (first, _), (bad, retries), (last, _) = scored.run(test)
    assert first == last == Score(4.0) and time.monotonic() - began < 30
    assert isinstance(bad, SampleFailure) and (bad.kind, bad.uid, bad.attempts) == ("unavailable", "row/2", ATTEMPTS)
    assert bad.cause.startswith("it answered 500") and retries == ATTEMPTS - 1
    assert not any(gate.outage() for gate in scored.scoring.gates.values())


def test_a_function_of_the_user_reports_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = RewardConfig(function="tests.support.scorers:needs_file", processes=1, retries=0)
    scoring = Scoring(terms_of(settings.function, {}, ["mine"]), settings)
    file = tmp_path / "index"

    async def test() -> list[Outcome]:
        waiting = asyncio.gather(*(scoring.score([row(number)]) for number in range(3)))
        await asyncio.sleep(1.0)
        (gate,) = scoring.gates.values()
        outage = gate.outage()
        assert outage is not None and (outage.service, outage.cause) == (
            "scorer 'tests.support.scorers:needs_file'",
            "the index is being built",
        )
        file.touch()
        return [outcome for group in await waiting for outcome in group]

    scoring.start()
    try:
        outcomes = asyncio.run(asyncio.wait_for(test(), 30))
    finally:
        scoring.close()
    assert [score for score, _ in outcomes] == [Score(1.0)] * 3
