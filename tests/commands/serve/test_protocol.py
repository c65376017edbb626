"""Requests of the published client, recorded or from the installed client."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megarl.commands.serve import wire
from megarl.commands.serve.server import make_app
from tests.support.tinker_api import KEY, record, stand_in_api

RECORDED = Path(__file__).parents[2] / "fixtures" / "tinker" / "requests.json"


def test_recorded_requests_are_answered(tmp_path: Path) -> None:
    """All requests of a training loop with tinker 0.38.0 (`tests.support.tinker_api` recorded them). Ids are new in each run."""
    recorded = json.loads(RECORDED.read_text())
    assert recorded["client"] == "0.38.0"
    ids: dict[bytes, bytes] = {}
    answered = set()
    with stand_in_api(tmp_path) as api:
        client = TestClient(make_app(api, KEY), headers={"x-api-key": KEY})
        for request in recorded["requests"]:
            body, path = base64.b64decode(request["body"]), request["path"]
            for old, new in _replaced(body + path.encode(), ids, api):
                body, path = body.replace(old, new), path.replace(old.decode(), new.decode())
            answer = client.request(request["method"], path, content=body, headers=request["headers"])
            assert answer.status_code == 200, (path, answer.text)
            answered.add(path.removeprefix("/api/v1/"))
            if path.endswith("retrieve_future"):
                _check_answer(body, answer)
    assert {"forward_backward", "optim_step", "asample", "save_weights", "load_weights"} <= answered
    names = [call[0] if isinstance(call, tuple) else type(call).__name__ for call in api.session.calls]  # type: ignore[attr-defined]
    assert names == [
        "cross_entropy", "AdamParams", "ppo", "cross_entropy", "SamplingParams", "SamplingParams", "save", "load",
    ]  # fmt: skip


def _replaced(text: bytes, ids: dict[bytes, bytes], api: Any) -> list[tuple[bytes, bytes]]:
    """Return (recorded, new) for the random ids in `text`, which are given out in the same order."""
    for prefix, current in ((b"s-", api.sessions._sessions), (b"sampler-", api._samplers)):
        for old in re.findall(prefix + rb"[0-9a-f]{16}", text):
            if old not in ids:
                number = len([key for key in ids if key.startswith(prefix)])
                ids[old] = [*current][number].encode()
    return [(old, new) for old, new in ids.items() if old in text]


def _check_answer(body: bytes, answer: Any) -> None:
    if answer.headers["content-type"] == "application/json":
        assert "error" not in answer.json(), answer.text
    elif b":sample:" in body:
        assert wire.parse("SampleResponse", answer.content).sequences
    else:
        assert wire.parse("ForwardBackwardOutput", answer.content).metrics["loss:sum"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tinker") is None, reason="the client is not installed: pip install tinker"
)
def test_the_installed_client(tmp_path: Path) -> None:
    """The client itself, over a socket: it checks every answer."""
    record(tmp_path / "requests.json")
    assert len(json.loads((tmp_path / "requests.json").read_text())["requests"]) > 30
