"""Answers that clients fetch: how many are kept, and for how long."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.calls import CallAnswer, CallAnswers, TooManyCalls, TrainerCalls, end_text
from megarl.commands.serve.command import _answering
from megarl.exit_status import Terminated
from tests.commands.serve.test_api import PROTOBUF, error, fetch, new_model, pass_body, post, run_pass, sample
from tests.support.tinker_api import KEY, stand_in_api


def test_too_many_calls_wait() -> None:
    calls = TrainerCalls()
    with pytest.raises(TooManyCalls, match="256 calls wait"):
        for _ in range(257):
            calls.submit(CallAnswer)


def test_fetched_answers_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.commands.serve.calls.MOST_ANSWER_BYTES", 10)
    answers, calls = CallAnswers(lambda session: False), TrainerCalls()
    for name in ("a", "b", "c"):
        answers.add(name, "s", calls.submit(CallAnswer))
    answers.fetched("a", 8)
    assert answers.get("a") is not None, "a response may be lost: the client fetches again"
    answers.fetched("b", 8)
    assert answers.get("a") is None and answers.get("b") is not None and answers.get("c") is not None


def new_sampler(client: TestClient) -> tuple[str, str]:
    """Return the ids of a session and of its sampler."""
    model = new_model(client)
    saved = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))
    return model.partition(":")[0], saved["sampling_session_id"]


@pytest.mark.parametrize("how", ["finished", "silent"])
def test_answers_of_ended_sessions_are_forgotten(
    client: TestClient, api: TrainingApi, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A loop that is killed leaves the answers of its running samples, up to 2,000 with the published client."""
    session, sampler = new_sampler(client)
    promises = [post(client, "asample", **sample(client, sampler, number)) for number in range(3)]
    with monkeypatch.context() as patch:
        if how == "finished":
            post(client, f"sessions/{session}/finish")
        else:
            patch.setattr("megarl.commands.serve.clients.ALIVE_SECONDS", -1.0)
        new_model(client)
    assert all(api.answers.get(promise["request_id"]) is None for promise in promises)
    lost = error(client, "retrieve_future", 404, request_id=promises[0]["request_id"])
    assert "it was fetched before, its session has ended, or the server has restarted" in lost


def test_room_comes_from_ended_sessions_first(
    client: TestClient, api: TrainingApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session may end, by silence, after the newest session began."""
    old, sampler = new_sampler(client)
    for number in range(4):
        post(client, "asample", **sample(client, sampler, number))
    new = post(client, "create_session")["session_id"]
    body = {"session_id": new, "sampling_session_seq_id": 0, "base_model": "org/tiny"}
    sampler = post(client, "create_sampling_session", **body)["sampling_session_id"]
    monkeypatch.setattr("megarl.commands.serve.calls.MOST_ANSWERS", 4)
    assert "4 answers wait to be fetched" in error(client, "asample", 429, **sample(client, sampler))
    api.sessions._sessions[old].seen -= 61
    fetch(client, post(client, "asample", **sample(client, sampler)))


def test_a_call_without_a_place_for_its_answer_does_not_start(
    client: TestClient, api: TrainingApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends it again, and it runs once."""
    model = new_model(client)
    sampler = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))["sampling_session_id"]
    waiting = [post(client, "asample", **sample(client, sampler, number)) for number in range(2)]
    monkeypatch.setattr("megarl.commands.serve.calls.MOST_ANSWERS", 2)
    started = len(api.session.calls)
    for _ in range(3):
        assert client.post("/api/v1/forward_backward", content=pass_body(model, 2), headers=PROTOBUF).status_code == 429
        error(client, "asample", 429, **sample(client, sampler, 2))
    fetch(client, waiting[0])
    run_pass(client, pass_body(model, 2))
    assert api.session.passes == 1 and len(api.session.calls) == started + 1


def test_the_end_of_the_server_is_answered(client: TestClient, api: TrainingApi) -> None:
    """Otherwise a client would ask for these answers until it is stopped too."""
    model, trainers_go_on = new_model(client), threading.Event()
    sampler = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))["sampling_session_id"]
    sampling: Future[Any] = Future()
    api.session.begin_sample = lambda *_: sampling  # type: ignore[method-assign]
    promises = [post(client, "asample", **sample(client, sampler))]
    running = api.calls.submit(lambda: CallAnswer(b"late", is_protobuf=trainers_go_on.wait(30)))
    answer = client.post("/api/v1/forward_backward", content=pass_body(model, 2), headers=PROTOBUF)
    promises += [answer.json(), post(client, "save_weights", model_id=model, seq_id=3, path="one")]
    api.end("the server was stopped")
    for promise in promises:
        assert fetch(client, promise) == {"error": "the server was stopped", "category": "server"}
    assert error(client, "asample", 503, **sample(client, sampler, 1)) == "the server was stopped"
    refused = error(client, "optim_step", 503, model_id=model, seq_id=4, adam_params={})
    assert refused == "the server was stopped"
    sampling.set_result([])
    trainers_go_on.set()
    assert running.result(30).body == b"late"
    assert api.session.passes == 0, "a call that was answered runs"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated])
def test_an_interrupted_call_is_named(kind: type[BaseException]) -> None:
    calls = TrainerCalls()

    def interrupt() -> CallAnswer:
        raise kind

    future = calls.submit(interrupt)
    with pytest.raises(kind):
        calls.serve(lambda: None)
    assert future.result().error == "the server was stopped before this call was complete"


def test_clients_that_wait_receive_the_end(tmp_path: Path) -> None:
    """Over a socket, with another client in the middle of its body, which delays the end by at most seconds."""
    with stand_in_api(tmp_path) as api, socket.create_server(("127.0.0.1", 0)) as listener:
        address, answers, trainers_go_on = listener.getsockname(), [], threading.Event()
        client = httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", headers={"x-api-key": KEY}, timeout=30)
        with pytest.raises(KeyboardInterrupt), _answering(api, KEY, listener):
            model = new_model(client)  # type: ignore[arg-type]
            api.calls.submit(lambda: CallAnswer(is_protobuf=trainers_go_on.wait(30)))
            promise = post(client, "save_weights", model_id=model, seq_id=1, path="one")  # type: ignore[arg-type]
            look = threading.Thread(target=lambda: answers.append(fetch(client, promise)))  # type: ignore[arg-type]
            look.start()
            slow = socket.create_connection(address)
            head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 9\r\n\r\n"
            slow.sendall(head.encode())
            time.sleep(0.5)
            started = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - started < 9
        look.join(10)
        trainers_go_on.set()
        slow.close()
        assert answers == [{"error": end_text(KeyboardInterrupt()), "category": "server"}]
