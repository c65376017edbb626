"""The scorer `remote` against a server with the faults of real services, and refused settings."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.preflight.data import Prepared, prepare_rewards
from megarl.preflight.load import load_recipe
from megarl.preflight.recipe.reward import remote_notices
from megarl.recipe import RecipeError
from megarl.recipe.remote import RemoteConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards import RewardError, Score, ScoreRequest, ScorerSettings, find, score_awaited
from megarl.rewards.scoring import Scoring
from megarl.rewards.weighted import terms_of
from megarl.types import SampleFailure, Turn

SECRET = "Bearer s3cr3t"


@dataclass
class Answer:
    body: Any = field(default_factory=lambda: {"score": 0.5})
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False  # the connection is closed without a word
    trickle: float = 0.0  # seconds between the bytes

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Service(ThreadingHTTPServer):
    """Answer with `answers`, repeating the last; record request, time and connection of each call."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = [Answer()]
        self.calls: list[tuple[float, tuple[str, int], dict[str, str], Any]] = []
        self.lock, self.in_flight, self.most = threading.Lock(), 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def waits(self) -> list[float]:
        """Seconds from each request to the next."""
        times = [call[0] for call in self.calls]
        return [after - before for before, after in itertools.pairwise(times)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.calls.append((time.monotonic(), self.client_address, headers, body))
            answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
            self.server.in_flight += 1
            self.server.most = max(self.server.most, self.server.in_flight)
        time.sleep(answer.delay)
        with self.server.lock:
            self.server.in_flight -= 1
        with contextlib.suppress(ConnectionError):
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        if answer.drop:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {"content-length": str(len(answer.data)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not answer.trickle:
            self.wfile.write(answer.data)
            return
        for start in range(len(answer.data)):
            time.sleep(answer.trickle)
            self.wfile.write(answer.data[start : start + 1])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


REQUEST = ScoreRequest("It is 4", "4", "mine", {"level": 2}, "2 + 2?", "row/7", (Turn("assistant", "It is 4"),))


def score_of(service: Service, request: ScoreRequest = REQUEST, **settings: Any) -> Score:
    remote = RemoteConfig(**{"url": service.url, "timeout": 2.0, "first_wait": 0.01, "longest_wait": 1.5, **settings})
    return asyncio.run(score_awaited(find("remote", ScorerSettings(remote)), request))


def test_the_request_has_all_fields_and_the_answer_becomes_a_score(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    answer = {"score": 1, "accuracy": True, "answer": "4", "reason": "right", "steps": [[2, 0.25]]}
    service.answers = [Answer(answer), Answer(0.75)]
    got = score_of(service, headers={"Authorization": "MY_TOKEN"})
    assert got == Score(1.25, {"accuracy": 1.0, "steps": 0.25}, "4", ((2, 0.25),), "right")
    _, _, headers, body = service.calls[0]
    assert headers["authorization"] == SECRET and headers["content-type"] == "application/json"
    turn = body.pop("turns")
    assert len(turn) == 1 and turn[0]["text"] == "It is 4"
    assert body == {
        "response": "It is 4",
        "ground_truth": "4",
        "data_source": "mine",
        "extra_info": {"level": 2},
        "prompt_text": "2 + 2?",
        "uid": "row/7",
        "messages": [],
        "loop_fields": [],
    }
    extra = {"counts": np.array([1, 2]), "share": np.float32(0.5)}
    assert score_of(service, ScoreRequest("\ud83d \x00", None, "mine", extra)) == Score(0.75)
    assert service.calls[1][3]["extra_info"] == {"counts": [1, 2], "share": 0.5}
    with pytest.raises(RewardError, match="Out of range float values are not JSON compliant"):
        score_of(service, ScoreRequest("", float("nan"), "mine"))


@pytest.mark.parametrize(
    "bad", [Answer(drop=True), Answer(status=500), Answer(status=503), Answer(status=429), Answer(delay=0.6)]
)
def test_temporary_failures_are_retried(service: Service, bad: Answer) -> None:
    service.answers = [bad, bad, Answer(0.25)]
    assert score_of(service, timeout=0.4) == Score(0.25)
    assert len(service.calls) == 3


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Answer(drop=True), "no connection: RemoteProtocolError: Server disconnected without sending a response."),
        (Answer({"busy": 1}, status=500), "it answered 500: '{\"busy\": 1}'"),
        (Answer(delay=1.0), "no answer within 0.4 s"),
        (Answer(b" " * 100, trickle=0.05), "no answer within 0.4 s"),  # of each byte there is news in time
    ],
)
def test_a_persistent_failure_is_raised_after_all_attempts(service: Service, bad: Answer, cause: str) -> None:
    service.answers = [bad]
    with pytest.raises(RewardError) as raised:
        score_of(service, timeout=0.4, attempts=2)
    assert raised.value.cause == f"{cause} (2 requests)" == str(raised.value.unavailable)
    assert len(service.calls) == 2


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Answer(b"x" * 1000, status=422), f"it answered 422: '{'x' * 300}'"),
        (Answer(b"no key", status=401), "it answered 401: 'no key'"),
        (Answer(status=302, headers={"location": "http://127.0.0.1:9/"}), "it answered 302, see http://127.0.0.1:9/: "),
        (Answer(b"{score: 1}"), "its answer is not JSON (Expecting property name enclosed in double quotes: "),
        (Answer(b"[" * 100_000), "its answer is not JSON ("),
        (Answer(b"1" * 5000), "its answer is not JSON ("),
        (Answer(b"\xff"), "its answer is not JSON ("),
        (Answer(b" " * (1 << 20) + b"1"), "its answer has more than 1 MiB"),
        (Answer(status=204, body=b""), "it answered 204"),
    ],
)
def test_permanent_failures_are_not_retried(service: Service, bad: Answer, cause: str) -> None:
    service.answers = [bad]
    with pytest.raises(RewardError) as raised:
        score_of(service)
    assert raised.value.cause.startswith(f"it raised ServiceError: {cause}"), raised.value.cause
    assert raised.value.unavailable is None, "a permanent failure"
    assert len(service.calls) == 1 and len(raised.value.cause) < 600


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"NaN", "the score is nan, not a finite number"),
        ({"score": "1"}, "'score' is '1' (str), not a number"),
        ({"reward": 1}, "its dict has no 'score', but ['reward']"),
        (None, "the score is None (NoneType), not a number"),
    ],
)
def test_invalid_answers_are_refused(service: Service, answer: Any, cause: str) -> None:
    service.answers = [Answer(answer)]
    with pytest.raises(RewardError) as raised:
        score_of(service)
    assert raised.value.cause == cause


def test_an_oversized_answer_is_not_read(service: Service) -> None:
    """A response that announces 1 GiB is cut off at the limit."""
    service.answers = [Answer(b" " * (4 << 20), headers={"content-length": str(1 << 30)})]
    with pytest.raises(RewardError, match="more than 1 MiB"):
        score_of(service)


def test_retry_after_is_respected_up_to_a_limit(service: Service) -> None:
    """The wait is a number of seconds or a date in whole seconds; one above the limit fails at once."""
    until = email.utils.formatdate(time.time() + 2, usegmt=True)
    service.answers = [
        Answer(status=503, headers={"retry-after": until}),
        Answer(status=429, headers={"retry-after": "1"}),
        Answer(1.0),
    ]
    assert score_of(service, longest_wait=3.0) == Score(1.0)
    first, second = service.waits()
    assert 0.5 <= first < 2.5 and 1.0 <= second < 1.5
    service.answers = [Answer(status=429, headers={"retry-after": "120"})]
    began = time.monotonic()
    asks = r"it asks for 120 s of waiting, and reward.remote.longest_wait is 1.5"
    with pytest.raises(RewardError, match=asks) as raised:
        score_of(service)
    assert (
        time.monotonic() - began < 1 and raised.value.unavailable is not None and raised.value.unavailable.after == 120
    )


def test_waits_grow_up_to_longest_wait(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random waits are at their maximum here: 0.1, 0.2 and 0.4, limited to 0.3."""
    monkeypatch.setattr("megarl.rewards.remote.random.uniform", lambda least, most: most)
    service.answers = [Answer(status=500)]
    with pytest.raises(RewardError, match="4 requests"):
        score_of(service, attempts=4, first_wait=0.1, longest_wait=0.3)
    for wait, expected in zip(service.waits(), (0.1, 0.2, 0.3), strict=True):
        assert expected <= wait < expected + 0.1


def test_connections_stay_open_and_samples_wait_together(service: Service) -> None:
    """One process scores 32 samples, 16 at a time, 0.1 s each, over as many connections, as in a run."""
    service.answers = [Answer(0.5, delay=0.1)]
    remote = RemoteConfig(url=service.url)
    settings = RewardConfig(function="remote", processes=1, concurrent=16, timeout=100.0, remote=remote)
    scoring = Scoring(terms_of(settings.function, {}, ["mine"]), settings)
    scoring.start()
    try:
        outcomes = asyncio.run(scoring.score([REQUEST] * 32))
        service.answers = [Answer(b"never", status=403)]
        ((failed, retries),) = asyncio.run(scoring.score([REQUEST]))
    finally:
        scoring.close()
    assert outcomes == [(Score(0.5), 0)] * 32
    assert 12 <= service.most <= 16 and len({connection for _, connection, _, _ in service.calls}) <= 16
    assert isinstance(failed, SampleFailure) and (failed.uid, retries) == ("row/7", 1)
    assert failed.cause == "it raised ServiceError: it answered 403: 'never'"


@pytest.mark.parametrize("value", [None, "", "Bearer s3cr3t\n", "Bearer s3cr3t\r\nX: 1", "Bearer s3cr3té"])
def test_an_invalid_header_value_is_refused_and_never_printed(
    value: str | None, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_TOKEN", value)
    scorer = find("remote", ScorerSettings(RemoteConfig(url=service.url, headers={"Authorization": "MY_TOKEN"})))
    assert scorer.prepare is not None
    with pytest.raises(ValueError, match="Authorization reads MY_TOKEN") as raised:
        scorer.prepare()
    assert "s3cr3t" not in str(raised.value)


def test_a_missing_header_value_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is refused, and an unencrypted address gets a notice."""
    monkeypatch.delenv("MY_TOKEN", raising=False)
    (tmp_path / "recipe.yaml").write_text("model: {path: some/model}\n")
    url, headers = "reward.remote.url=http://judge.example.com", "reward.remote.headers={Authorization: MY_TOKEN}"
    recipe = load_recipe(tmp_path / "recipe.yaml", (*NAMED, url, headers))
    prompts: Any = SimpleNamespace(data_sources=["mine"])
    prepared = Prepared(None, prompts, None, None, None, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'remote' cannot be used here: .* MY_TOKEN, which is not set"):
        prepare_rewards(recipe, prepared)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    assert "plain http to judge.example.com" in prepare_rewards(recipe, prepared).notices[-1]


def test_no_header_value_is_logged(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    service.answers = [Answer(status=500), Answer(b"no", status=400)]
    with caplog.at_level(logging.INFO), pytest.raises(RewardError) as raised:
        score_of(service, headers={"Authorization": "MY_TOKEN"})
    assert "s3cr3t" not in caplog.text + str(raised.value)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., RecipeError]:
    def load(*overrides: str) -> RecipeError:
        (tmp_path / "recipe.yaml").write_text("model: {path: some/model}\n")
        with pytest.raises(RecipeError) as raised:
            load_recipe(tmp_path / "recipe.yaml", overrides)
        return raised.value

    return load


NAMED = ("reward.function=remote", "reward.timeout=100")
URL = "reward.remote.url=https://judge.example.com/score"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (NAMED, "reward.remote.url", "but its URL is unset"),
        (("reward.functions={gsm8k: 1.0, remote: 0.5}",), "reward.remote.url", "but its URL is unset"),
        ((URL,), "reward.remote", "this section has no effect"),
        ((*NAMED, "reward.remote.url=ftp://judge/score"), "reward.remote.url", "http or https"),
        ((*NAMED, "reward.remote.url=judge.example.com/score"), "reward.remote.url", "http or https"),
        ((*NAMED, "reward.remote.url='http://judge:port/'"), "reward.remote.url", "not a URL"),
        ((*NAMED, "reward.remote.url='https://me:s3cr3t@judge/'"), "reward.remote.url", "a name or a password"),
        ((*NAMED, URL, "reward.remote.headers={'X Y': MY_TOKEN}"), "reward.remote.headers", "header cannot be set"),
        (
            (*NAMED, URL, "reward.remote.headers={Authorization: Bearer s3cr3t}"),
            "reward.remote.headers",
            "not a valid name",
        ),
        # 3 requests of 20 s and 2 waits of 10 s.
        ((*NAMED, URL, "reward.timeout=79"), "reward.timeout", "80 s: 3 requests x 20 s + 2 waits x 10 s"),
    ],
)
def test_invalid_remote_settings_are_refused(
    refused: Callable[..., RecipeError], overrides: tuple[str, ...], key: str, words: str
) -> None:
    error = refused(*overrides)
    assert error.key == key and words in str(error)
    assert "s3cr3t" not in str(error)


def test_unencrypted_addresses_have_a_notice(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {path: some/model}\n")
    reward = load_recipe(tmp_path / "recipe.yaml", (*NAMED, URL, "reward.timeout=80")).reward
    assert remote_notices(reward) == []
    for url in ("http://localhost:80/", "http://127.0.0.3/", "http://[::1]:8000/score"):
        reward.remote.url = url
        assert remote_notices(reward) == []
    reward.remote.url = "http://judge.example.com/score"
    assert remote_notices(reward) == [
        "reward.remote.url is plain http to judge.example.com: samples are sent unencrypted"
    ]
    reward.remote.headers = {"Authorization": "MY_TOKEN"}
    assert remote_notices(reward)[0].endswith("samples and the headers' values are sent unencrypted")
