"""Fields of requests: unknown ones, wrong types and missing ones are refused, and so are gaps between the calls of a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from megarl.commands.serve import wire
from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.server import make_app
from tests.commands.serve.test_api import (
    KEY,
    NAME,
    PROTOBUF,
    adam,
    error,
    fetch,
    new_model,
    pass_body,
    post,
    run_pass,
    sample,
)

HUGE = 10**400


def new_sampler(client: TestClient) -> str:
    saved = fetch(client, post(client, "save_weights_for_sampler", model_id=new_model(client), seq_id=1))
    return str(saved["sampling_session_id"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_pattern": 3}, "create_model has rank_pattern, which this server does not know: it reads type, "),
        ({"lora_config": "x"}, "create_model: lora_config is 'x'; it must be an object"),
        ({"lora_config": {"rank": 0, "alpha": 8}}, "lora_config has alpha, which this server does not know"),
        ({"lora_config": {}}, "lora_config has no rank; it must be an integer"),
        ({"optimizer_config": [1]}, "optimizer_config is [1]; it must be an object"),
        ({"model_seq_id": True}, "model_seq_id is True; it must be an integer"),
        ({"session_id": None}, "create_model has no session_id; it must be a text"),
    ],
)
def test_models(client: TestClient, change: dict[str, Any], message: str) -> None:
    session = post(client, "create_session", tags=[], user_metadata=None)["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 0}, **change}
    assert message in error(client, "create_model", 400, **body)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"best_of": 3}, "asample has best_of"),
        ({"model_path": "tinker://a/sampler_weights/b"}, "asample has model_path"),
        ({"seq_id": None}, "asample has no seq_id"),
        ({"sampling_params": {"max_tokens": 4, "min_p": 0.2}}, "sampling_params has min_p"),
        ({"sampling_params": {"temperature": HUGE}}, "it must be a number"),
        ({"sampling_params": "x"}, "sampling_params is 'x'; it must be an object"),
        ({"prompt": "x"}, "prompt is 'x'; it must be an object"),
        ({"prompt": {"chunks": [[1]]}}, "the prompt has a chunk [1]; it must be an object"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, "the prompt has tokens that are not integers"),
        ({"prompt": {"chunks": [{"tokens": [1 << 70]}]}}, "the prompt has tokens that are not integers"),
        ({"prompt": {"chunks": [{"tokens": [1], "weight": 2}]}}, "chunk has weight"),
        ({"prompt_logprobs": "no"}, "prompt_logprobs is 'no'; it must be true or false"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n is 1 without prompt_logprobs"),
        ({"record_stability_info": True}, "in rl_loop with loss_fn=importance_sampling"),
    ],
)
def test_samples(client: TestClient, more: dict[str, Any], message: str) -> None:
    content = json.dumps({**sample(client, new_sampler(client)), **more})
    answer = client.post("/api/v1/asample", content=content)
    assert answer.status_code == 400 and message in answer.json()["error"]


@pytest.mark.parametrize(
    ("operation", "change", "message"),
    [
        ("optim_step", {"seq_id": None}, "optim_step has no seq_id"),
        ("optim_step", {"lr_schedule": 1}, "optim_step has lr_schedule"),
        ("save_weights", {"seq_id": 0}, "has seq_id 0, the number of create_model: number its calls from 1 on"),
        ("save_weights", {"path": None}, "save_weights has no path"),
        ("save_weights", {"overwrite": "false"}, "overwrite is 'false'; it must be true or false"),
        ("load_weights", {"optimizer": True, "optimizer_config": {"type": "dimuon"}}, "type 'dimuon'"),
        ("load_weights", {"optimizer": True, "session_id": "s"}, "or model_id and seq_id for one in training"),
        ("load_weights", {}, "load_weights has no optimizer"),
    ],
)
def test_calls_of_a_model(
    client: TestClient, api: TrainingApi, operation: str, change: dict[str, Any], message: str
) -> None:
    model = new_model(client)
    body = {"adam_params": {}} if operation == "optim_step" else {"path": f"tinker://{model}/weights/one"}
    assert message in error(client, operation, 400, model_id=model, **{"seq_id": 1, **body, **change})
    assert api.session.calls == []


def test_a_rate_that_no_float_can_hold_is_refused(client: TestClient) -> None:
    """In the thread of the trainers, an OverflowError would end the server."""
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    assert "it must be a finite number" in adam(client, model, 2, learning_rate=HUGE)["error"]
    assert adam(client, model, 3) == {"metrics": {"grad_norm": 2.5}}


def test_a_pass_with_an_unknown_field(client: TestClient) -> None:
    """The client's provenance of a datum is known, and not used."""
    model, newer = new_model(client), b"\x7a\x01x"
    answer = client.post("/api/v1/forward_backward", content=pass_body(model, 1) + newer, headers=PROTOBUF)
    assert answer.status_code == 400 and "has a field that this server does not know" in answer.json()["error"]
    message = wire.parse("ForwardBackwardRequest", pass_body(model, 1))
    message.data[0].model_input_spans.append(b"\x0a\x00")
    assert wire.parse("ForwardBackwardOutput", run_pass(client, message.SerializeToString())).metrics["loss:sum"]


def test_a_shape_that_the_values_do_not_have(client: TestClient) -> None:
    model = new_model(client)
    message = wire.parse("ForwardBackwardRequest", pass_body(model, 1))
    message.data[0].loss_fn_inputs["weights"].shape[0] = 5
    refused = run_pass(client, message.SerializeToString())["error"]
    assert refused == "datum 0: weights has shape [5] and 2 values; both must be equal"
    message.seq_id, message.data[0].model_input[0].encoded_text.tokens = 2, b"abc"
    assert "model_input has 3 bytes, not a multiple of 4" in run_pass(client, message.SerializeToString())["error"]


def test_no_update_follows_a_pass_that_did_not_arrive(client: TestClient, api: TrainingApi) -> None:
    """The client sends the update although its pass was too large; the real service would wait for the missing number for ever."""
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    refused = adam(client, model, 3)
    assert "call 2 of" in refused["error"] and refused["category"] == "user"
    assert api.session.updates == 0 and api.session.passes == 0
    run_pass(client, pass_body(model, 4))
    assert adam(client, model, 5) == {"metrics": {"grad_norm": 2.5}}
    assert "calls 6 to 999999998 of" in adam(client, model, 999_999_999)["error"]


@pytest.mark.parametrize(("operation", "status"), [("save_weights", 400), ("save_weights_external", 404)])
def test_a_refused_save_leaves_no_gap(client: TestClient, operation: str, status: int) -> None:
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    error(client, operation, status, model_id=model, seq_id=2, path="one", ttl_seconds=-1)
    assert adam(client, model, 3) == {"metrics": {"grad_norm": 2.5}}


def test_a_refused_save_does_not_hide_a_pass_that_did_not_arrive(client: TestClient, api: TrainingApi) -> None:
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    error(client, "save_weights", 400, model_id=model, seq_id=3, path="one", ttl_seconds=-1)
    assert "calls 2 to 3 of" in adam(client, model, 4)["error"] and api.session.updates == 0
    error(client, "save_weights", 400, model_id=model, seq_id=5, path="one", ttl_seconds=-1)
    run_pass(client, pass_body(model, 6))
    assert adam(client, model, 7) == {"metrics": {"grad_norm": 2.5}}


def test_a_number_belongs_to_one_call(client: TestClient) -> None:
    model = new_model(client)
    run_pass(client, pass_body(model, 1))
    body = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert "has seq_id 1, the number of forward_backward" in error(client, "optim_step", 400, **body)


def test_a_project_is_named_in_a_warning(client: TestClient) -> None:
    warning = post(client, "create_session", project_id="p1")["warning_message"]
    assert warning == "project_id 'p1' is not used: this server has no projects"


def test_a_body_that_is_nested_too_deeply(client: TestClient) -> None:
    answer = client.post("/api/v1/create_session", content=b"[" * 100_000)
    assert answer.status_code == 400 and "the body is not JSON" in answer.json()["error"]


def test_a_failure_of_the_server_is_named(client: TestClient, api: TrainingApi) -> None:
    api.session.model.config = None  # type: ignore[assignment]
    message = error(client, "get_info", 500, model_id=new_model(client))
    assert message.startswith("the server failed, see its output: AttributeError: ")


def test_a_client_that_goes_in_the_middle_of_its_body(api: TrainingApi) -> None:
    """Not an error of the server, which would print a traceback."""
    events = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/v1/create_session", "query_string": b"", "root_path": ""}
    asyncio.run(make_app(api, KEY)({**scope, "headers": [(b"x-api-key", KEY.encode())]}, receive, send))
    assert sent[0]["status"] == 400 and b"the client has gone before the end of its body" in sent[1]["body"]
