"""The Tinker API over HTTP, with stand-in trainers: order, refusals, keys and sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from megarl.commands.serve import wire
from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.calls import CallAnswer, TrainerCalls
from megarl.commands.serve.server import make_app
from tests.support.tinker_api import KEY, NAME, stand_in_api

PROTOBUF = {"content-type": "application/x-protobuf"}
PROMPT_OF_90 = {"chunks": [{"type": "encoded_text", "tokens": [5] * 90}]}


def post(client: TestClient, operation: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/api/v1/{operation}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def error(client: TestClient, operation: str, status: int, **body: Any) -> str:
    answer = client.post(f"/api/v1/{operation}", json=body)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"])


def fetch(client: TestClient, promise: dict[str, Any]) -> Any:
    headers = {"accept": PROTOBUF["content-type"]}
    answer = client.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.content


def new_model(client: TestClient, **lora: Any) -> str:
    session = post(client, "create_session")["session_id"]
    config = {"rank": 0, **lora}
    promise = post(client, "create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=config)
    assert fetch(client, promise) == {"type": "create_model", "model_id": f"{session}:train:0"}
    return f"{session}:train:0"


def tensor(values: list[float], kind: int = wire.FLOAT32) -> Any:
    message = wire.new("Tensor")
    message.dense = np.asarray(values, "<f4" if kind == wire.FLOAT32 else "<i8").tobytes()
    message.dtype = kind
    message.shape.append(len(values))
    return message


def pass_body(model: str, number: int, loss: str = "cross_entropy", **vectors: list[float]) -> bytes:
    message = wire.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, number, loss
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor([6, 7], wire.INT64))
    for name, values in (vectors or {"weights": [1.0, 1.0]}).items():
        datum.loss_fn_inputs[name].CopyFrom(tensor(values))
    return bytes(message.SerializeToString())


def run_pass(client: TestClient, body: bytes) -> Any:
    answer = client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 200, answer.text
    return fetch(client, answer.json())


def adam(client: TestClient, model: str, number: int, **params: Any) -> Any:
    settings = {"learning_rate": 0.1, **params}
    return fetch(client, post(client, "optim_step", model_id=model, seq_id=number, adam_params=settings))


def test_a_pass_and_an_update(client: TestClient, api: TrainingApi) -> None:
    model = new_model(client)
    output = wire.parse("ForwardBackwardOutput", run_pass(client, pass_body(model, 1)))
    (record,) = output.loss_fn_outputs
    assert np.frombuffer(record.fields["logprobs"].data, "<f4") == pytest.approx([-0.06, -0.07])
    assert np.frombuffer(record.fields["logprobs"].offsets, "<i8").tolist() == [0, 8]
    assert record.num_datums == 1 and output.metrics["loss:sum"] == pytest.approx(0.13)
    assert adam(client, model, 2) == {"metrics": {"grad_norm": 2.5}}


def test_a_request_that_is_sent_again_runs_once(client: TestClient, api: TrainingApi) -> None:
    model = new_model(client)
    for _ in range(2):
        run_pass(client, pass_body(model, 1))
    assert api.session.passes == 1
    for _ in range(2):
        assert adam(client, model, 2) == {"metrics": {"grad_norm": 2.5}}
    assert api.session.updates == 1


def test_no_update_follows_a_failed_pass(client: TestClient, api: TrainingApi) -> None:
    """Its gradient is missing: the update would be another one than the caller wants. Later updates work."""
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    failed = run_pass(client, pass_body(model, 2, "ppo"))
    assert "lacks" in failed["error"] and failed["category"] == "user"
    refused = adam(client, model, 3)
    assert "a forward_backward call before it failed" in refused["error"] and refused["category"] == "user"
    assert api.session.updates == 0 and api.session.passes == 0
    run_pass(client, pass_body(model, 4))
    assert adam(client, model, 5) == {"metrics": {"grad_norm": 2.5}}


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({"weights": [1.0]}, "weights has 1 entries and model_input 2 tokens"),
        ({"weights": [1.0, 1.0], "target_tokens": [6.0, 7.0]}, "target_tokens are float32; they must be int64"),
    ],
)
def test_data_of_a_wrong_form(client: TestClient, vectors: dict[str, list[float]], message: str) -> None:
    assert message in run_pass(client, pass_body(new_model(client), 1, **vectors))["error"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"momentum": 1.0}, "adam_params has momentum; this server reads"),
    ],
)
def test_settings_of_adam_are_checked(client: TestClient, params: dict[str, float], message: str) -> None:
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    assert message in adam(client, model, 2, **params)["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "other"}, "base_model is 'other'; this server has 'org/tiny'"),
        ({"lora_config": {"rank": 32}}, "rank is 32, and this server trains all weights (rank 0)"),
        ({"lora_config": {"rank": 0, "train_mlp": False}}, "train_mlp: this server trains all weights"),
        ({"lora_config": {"rank": 0, "seed": 4}}, "seed is 4; adapters start from train.seed=0"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config has type 'dimuon'"),
    ],
)
def test_models_that_the_server_cannot_train(client: TestClient, change: dict[str, Any], message: str) -> None:
    session = post(client, "create_session")["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 0}, **change}
    assert message in error(client, "create_model", 400, **body)


def test_one_model_at_a_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_model(client)
    other = post(client, "create_session")["session_id"]
    body = {"session_id": other, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 0}}
    assert f"{first} is in training" in error(client, "create_model", 400, **body)
    post(client, f"sessions/{first.partition(':')[0]}/finish")
    assert fetch(client, post(client, "create_model", **body))["model_id"] == f"{other}:train:0"
    assert "is not in training on this server" in error(client, "get_info", 404, model_id=first)
    monkeypatch.setattr("megarl.commands.serve.clients.ALIVE_SECONDS", -1.0)  # a client that has gone
    assert new_model(client)


def test_a_finished_session_ends_its_heartbeat(client: TestClient) -> None:
    session = post(client, "create_session")["session_id"]
    post(client, "session_heartbeat", session_id=session)
    post(client, f"sessions/{session}/finish")
    assert "finished" in error(client, "session_heartbeat", 410, session_id=session)


def sample(client: TestClient, sampler: str, number: int = 0, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "num_samples": 2}
    return {**body, "sampling_params": {"max_tokens": 4}, **more}


def test_sampling_with_log_probs_of_the_prompt(client: TestClient, api: TrainingApi) -> None:
    model = new_model(client)
    saved = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))
    body = sample(client, saved["sampling_session_id"], prompt_logprobs=True, prompt_logprobs_last_n=1)
    promise = post(client, "asample", **body)
    assert len(promise["sample_sequence_ids"]) == 2
    response = wire.parse("SampleResponse", fetch(client, promise))
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in response.sequences] == [[7], [7, 8]]
    assert np.frombuffer(response.sequences[1].logprobs, "<f4").tolist() == [-1.0, -1.0]
    assert np.frombuffer(response.prompt_logprobs, "<f4") == pytest.approx([np.nan, np.nan, -0.5], nan_ok=True)
    assert api.session.calls[-1].seed is None and api.session.calls[-1].stop_ids is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling_params": {"max_tokens": 4, "stop": "x"}}, "stop is 'x'; this server stops at tokens"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0; it must be at least 1"),
        ({"sampling_params": {"max_tokens": 4, "top_p": 0}}, "top_p is 0.0; it must be above 0"),
        ({"prompt_alt_tokens_k": 2}, "sample has prompt_alt_tokens_k"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "the prompt has a chunk of type 'image'"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "it must be from 1 to 2"),
        (
            {"prompt": PROMPT_OF_90, "sampling_params": {}},
            "the prompt has 90 tokens, and with its response it may have 64",
        ),
        ({"prompt": PROMPT_OF_90}, "send at most 63, or serve the recipe with longer limits"),
    ],
)
def test_samples_that_the_server_cannot_draw(client: TestClient, more: dict[str, Any], message: str) -> None:
    model = new_model(client)
    saved = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))
    assert message in error(client, "asample", 400, **sample(client, saved["sampling_session_id"], **more))


def test_older_weights_are_not_sampled_with_newer_ones(client: TestClient) -> None:
    model = new_model(client)
    old = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=1))["sampling_session_id"]
    run_pass(client, pass_body(model, 2))
    adam(client, model, 3)
    post(client, "asample", **sample(client, old))  # the engines still have them
    named = fetch(client, post(client, "save_weights_for_sampler", model_id=model, seq_id=4, path="two"))["path"]
    assert named == f"tinker://{model}/sampler_weights/two"
    assert "no longer have these weights" in error(client, "asample", 400, **sample(client, old, number=1))
    session = model.partition(":")[0]
    sampler = post(client, "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=named)
    post(client, "asample", **sample(client, sampler["sampling_session_id"]))
    refused = error(client, "create_sampling_session", 400, session_id=session, base_model=NAME)
    assert "the engines hold one version of the weights, and this is not it" in refused


def test_the_base_model_is_sampled_again_after_engines_have_slept(client: TestClient, api: TrainingApi) -> None:
    """On devices that they share with the trainers, engines sleep during training calls, and lose their weights."""

    def sampler(session: str) -> Any:
        return post(client, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=NAME)

    model = new_model(client)
    session = model.partition(":")[0]
    run_pass(client, pass_body(model, 1))
    api.session.sampled_updates = None
    fetch(client, post(client, "asample", **sample(client, sampler(session)["sampling_session_id"])))
    adam(client, model, 2)
    api.session.sampled_updates = None
    body = {"session_id": session, "base_model": NAME}
    assert "cannot be sampled now" in error(client, "create_sampling_session", 400, **body)
    post(client, f"sessions/{session}/finish")
    session = new_model(client).partition(":")[0]
    fetch(client, post(client, "asample", **sample(client, sampler(session)["sampling_session_id"])))


def test_states(client: TestClient, api: TrainingApi) -> None:
    model = new_model(client)
    saved = post(client, "save_weights", model_id=model, seq_id=1, path="one", ttl_seconds=3600)
    path = fetch(client, saved)["path"]
    assert path == f"tinker://{model}/weights/one"
    assert api.session.calls[-1] == ("save", "one", {"metadata": None, "overwrite": False, "seconds": 3600})
    post(client, f"sessions/{model.partition(':')[0]}/finish")
    session = post(client, "create_session")["session_id"]
    loaded = fetch(client, post(client, "load_weights", session_id=session, model_seq_id=0, path=path, optimizer=True))
    assert loaded["model_id"] == f"{session}:train:0" and api.session.calls[-1] == ("load", "one", True)
    for wrong, message in (
        ("sampler_weights/one", "it must be tinker://MODEL/weights/NAME"),
        ("weights/.one", "'.one'"),
    ):
        body = {"session_id": session, "model_seq_id": 1, "path": path.replace("weights/one", wrong), "optimizer": True}
        assert message in error(client, "load_weights", 400, **body)


def test_a_state_is_sought_when_its_turn_comes(client: TestClient, api: TrainingApi) -> None:
    """A client may ask for it before the save has run; and a search reads the whole state, while the client waits for a promise."""
    model, trainers_go_on = new_model(client), threading.Event()
    api.calls.submit(lambda: CallAnswer(is_protobuf=trainers_go_on.wait(30)))
    saved = post(client, "save_weights", model_id=model, seq_id=1, path="one")
    loaded = post(
        client, "load_weights", model_id=model, seq_id=2, path=f"tinker://{model}/weights/one", optimizer=True
    )
    assert api.session.calls == []
    trainers_go_on.set()
    assert fetch(client, saved)["type"] == "save_weights" and fetch(client, loaded)["type"] == "load_weights"
    assert [call[0] for call in api.session.calls] == ["save", "load"]


def test_a_model_whose_state_is_missing_gives_its_place_to_another(client: TestClient, api: TrainingApi) -> None:
    session = post(client, "create_session")["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "path": f"tinker://{session}:train:0/weights/gone",
        "optimizer": True,
    }
    promise = post(client, "load_weights", **body)
    failed = fetch(client, promise)
    assert "'gone' of" in failed["error"] and "does not exist" in failed["error"] and failed["category"] == "user"
    refused = run_pass(client, pass_body(promise["model_id"], 1))
    assert "has no weights: the state 'gone'" in refused["error"] and api.session.passes == 0
    fresh = {"session_id": session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 0}}
    assert fetch(client, post(client, "create_model", **fresh))["model_id"] == f"{session}:train:1"


@pytest.mark.parametrize("seconds", ["3600", True, 0, -5.5, pytest.param(10**400, id="huge")])
def test_lifetimes_are_checked_before_a_call_waits(client: TestClient, api: TrainingApi, seconds: Any) -> None:
    """In the thread of the trainers, a wrong type would end the server."""
    model = new_model(client)
    for operation in ("save_weights", "save_weights_for_sampler"):
        body = {"model_id": model, "seq_id": 1, "path": "one", "ttl_seconds": seconds}
        assert f"ttl_seconds is {seconds!r}; it must be a number" in error(client, operation, 400, **body)
    assert api.session.calls == [] and not api.exports.folder.exists()


def test_requests_need_the_key(api: TrainingApi) -> None:
    for headers in ({}, {"x-api-key": "tml-wrong"}, {"x-api-key": KEY + "x"}, {"authorization": f"Bearer {KEY}"}):
        answer = TestClient(make_app(api, KEY), headers=headers).post("/api/v1/create_session", json={})
        assert answer.status_code == 401 and "TINKER_API_KEY" in answer.json()["error"]


def test_bodies_have_a_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.commands.serve.server.MOST_JSON_BYTES", 100)
    assert "send fewer or shorter data" in error(client, "create_session", 413, tags=["x" * 200])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "the body is not JSON"), (b"[]", "JSON of type list"), (b"\xff", "the body is not JSON")],
)
def test_bodies_that_are_no_objects(client: TestClient, content: bytes, message: str) -> None:
    answer = client.post("/api/v1/create_session", content=content)
    assert answer.status_code == 400 and message in answer.json()["error"]


def test_a_damaged_pass_is_refused(client: TestClient) -> None:
    answer = client.post("/api/v1/forward_backward", content=b"\xff\xff", headers=PROTOBUF)
    assert answer.status_code == 400 and "is not a ForwardBackwardRequest" in answer.json()["error"]
    assert client.post("/api/v1/forward_backward", json={}).status_code == 415


def test_operations_that_the_server_lacks_are_named(client: TestClient) -> None:
    message = error(client, "save_weights_external", 404)
    assert message.startswith("POST /api/v1/save_weights_external: `megarl serve` does not have this operation")
    assert "the answer of request 'x' is not here" in error(client, "retrieve_future", 404, request_id="x")


def test_the_client_learns_where_adapters_are(tmp_path: Path) -> None:
    with stand_in_api(tmp_path, rank=8) as api:
        client = TestClient(make_app(api, KEY), headers={"x-api-key": KEY})
        assert "none on the unembedding" in post(client, "create_session")["warning_message"]


def test_a_failure_of_the_trainers_is_answered_and_ends_the_server() -> None:
    calls = TrainerCalls()

    def fail() -> CallAnswer:
        raise RuntimeError("trainer 1 died")

    future = calls.submit(fail)
    with pytest.raises(RuntimeError, match="trainer 1 died"):
        calls.serve(lambda: None)
    assert future.result().error == "the server ends: RuntimeError: trainer 1 died" and not future.result().by_caller
