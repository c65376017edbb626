"""`megarl serve` with real trainers and an engine: a loop over HTTP learns, Ctrl-C leaves no process, and errors before the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from megarl.commands.serve import command as serve_command
from megarl.commands.serve import wire
from megarl.commands.serve.command import api_key, serve_recipe, start_text
from megarl.commands.serve.prepare import _check_settings
from megarl.errors import InputError, RecipeError
from megarl.preflight.findings import Survey
from megarl.recipe.derived.served import served_recipe
from megarl.recipe.schema import Recipe
from tests.support.stack import ROOT, command, environment

KEY = "tml-" + "k" * 20
TOKENS = [5, 80, 9, 17, 33, 44, 2]
PROTOBUF = "application/x-protobuf"


class Client:
    """The calls of a training loop, without the published client."""

    def __init__(self, port: int, rank: int = 0) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", headers={"x-api-key": KEY}, timeout=120)
        self.session = self.post("create_session")["session_id"]
        self.model, self.calls = f"{self.session}:train:0", 0
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank}}
        self.fetch(self.post("create_model", **body))

    def post(self, operation: str, **body: Any) -> dict[str, Any]:
        return self.http.post(operation, json=body).raise_for_status().json()  # type: ignore[no-any-return]

    def train(self, operation: str, **body: Any) -> Any:
        self.calls += 1
        return self.fetch(self.post(operation, model_id=self.model, seq_id=self.calls, **body))

    def fetch(self, promise: dict[str, Any]) -> Any:
        while True:
            body = {"request_id": promise["request_id"]}
            answer = self.http.post("retrieve_future", json=body, headers={"accept": PROTOBUF})
            if answer.status_code != 408:
                break
        answer.raise_for_status()
        return answer.content if answer.headers["content-type"] == PROTOBUF else answer.json()

    def run_pass(self, *, forward_only: bool = False) -> tuple[float, list[float]]:
        self.calls += 1
        message = wire.new("ForwardBackwardRequest")
        message.model_id, message.seq_id, message.loss_fn = self.model, self.calls, "cross_entropy"
        message.forward_only = forward_only
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(TOKENS[:-1], "<i4").tobytes()
        for name, values, kind, dtype in (
            ("target_tokens", TOKENS[1:], wire.INT64, "<i8"),
            ("weights", [0, 0, 1, 1, 1, 1], wire.FLOAT32, "<f4"),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.array(values, dtype).tobytes(), kind
        headers = {"content-type": PROTOBUF}
        promise = self.http.post("forward_backward", content=message.SerializeToString(), headers=headers)
        output = wire.parse("ForwardBackwardOutput", self.fetch(promise.raise_for_status().json()))
        log_probs = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
        return output.metrics["loss:sum"], log_probs.tolist()


class Server:
    """The command, with its output in a file."""

    def __init__(self, model: Path, folder: Path, *settings: str) -> None:
        self.log = folder / "serve.log"
        arguments = command(
            "serve", "recipes/quickstart.yaml", f"model.path={model}", f"runs_dir={folder}", "name=served",
            "data.max_prompt_length=64", *settings, "--name", "tiny", "--port", "0",
        )  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, env={**environment(), "TINKER_API_KEY": KEY}, stdout=log, stderr=log
            )

    def port(self) -> int:
        deadline = time.monotonic() + 400
        while "Ctrl-C ends" not in (text := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        return int(text.split("TINKER_BASE_URL=http://127.0.0.1:")[1].split()[0])


@pytest.fixture(params=[0, pytest.param(8, marks=pytest.mark.slow)], ids=["all-weights", "adapters"])
def rank(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def server(quickstart_data: Path, tmp_path: Path, rank: int) -> Iterator[Server]:
    adapters = [f"lora.rank={rank}", "lora.alpha=16"] if rank else []
    server = Server(quickstart_data / "model", tmp_path, *adapters)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow
@pytest.mark.stack
def test_a_loop_over_http_learns_and_ctrl_c_ends_every_process(server: Server, rank: int) -> None:
    """Two data-parallel trainers over Ray, and an engine. The engine's log-probs equal the trainers'."""
    client = Client(server.port(), rank)
    first, start = client.run_pass(forward_only=True)
    for _ in range(8):
        loss, _ = client.run_pass()
        again, _ = client.run_pass()
        assert again == pytest.approx(loss, rel=1e-5), "a pass changes the weights"
        updated = client.train("optim_step", adam_params={"learning_rate": 1e-2, "eps": 1e-8})
        assert updated["metrics"]["grad_norm"] > 0
    last, log_probs = client.run_pass(forward_only=True)
    assert last < first - 10
    saved = client.train("save_weights_for_sampler")["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    settings = {"max_tokens": 1, "temperature": 1.0}
    body = {"sampling_session_id": saved, "seq_id": 0, "prompt": prompt, "sampling_params": settings}
    response = wire.parse("SampleResponse", client.fetch(client.post("asample", prompt_logprobs=True, **body)))
    assert np.frombuffer(response.prompt_logprobs, "<f4")[1:] == pytest.approx(log_probs, abs=1e-4)
    path = client.train("save_weights", path="one")["path"]
    client.run_pass()
    client.train("optim_step", adam_params={"learning_rate": 1e-2})
    client.train("load_weights", path=path, optimizer=True)
    assert client.run_pass(forward_only=True)[1] == pytest.approx(log_probs, abs=1e-6)
    client.post(f"sessions/{client.session}/finish")
    assert Client(server.port(), rank).run_pass(forward_only=True)[1] == pytest.approx(start, abs=1e-6), "not the start"
    _check_ctrl_c(server)


def _check_ctrl_c(server: Server) -> None:
    processes = _started_by(server.process.pid)
    assert len(processes) >= 3
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(60) == 0, server.log.read_text()
    assert server.log.read_text().rstrip().endswith("The server has ended.")
    deadline = time.monotonic() + 30
    while left := [pid for pid in processes if _lives(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.2)


def _started_by(parent: int) -> list[int]:
    """Return all descendants of a process."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found: list[int] = []
    for pid in parents:
        ancestor = parents.get(pid)
        while ancestor and ancestor != parent:
            ancestor = parents.get(ancestor)
        if ancestor == parent:
            found.append(pid)
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert api_key() != api_key() and api_key().startswith("tml-") and len(api_key()) > 30
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert api_key() == KEY
    for weak in ("", "tml-short", "x" * 30):
        monkeypatch.setenv("TINKER_API_KEY", weak)
        with pytest.raises(InputError, match="it must start with tml- and have at least 20 characters"):
            api_key()


def test_only_rank_0_of_torchrun_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Recipe] = []
    monkeypatch.setattr(serve_command, "serve", served.append)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as of_rank_0:
        serve_recipe(Recipe(), host="127.0.0.1", port=of_rank_0.getsockname()[1], name=None)
    assert served == [Recipe()]


def test_an_open_server_is_announced() -> None:
    assert "ssh -L 8451:localhost:8451" in start_text("tiny", "127.0.0.1", 8451, KEY)
    assert "Everyone with this key can train" in start_text("tiny", "0.0.0.0", 8451, KEY)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("megatron", "moe_aux_loss_coef", 0.1),
        ("megatron", "moe_z_loss_coef", 0.1),
        ("megatron", "routing_replay", "old_log_probs"),
        ("rollout", "min_engines", 1),
        ("cluster", "elastic", True),
        ("train", "source", "sft"),
        ("train", "resume", "auto"),
    ],
)
def test_settings_that_no_caller_could_follow_are_refused(section: str, name: str, value: Any) -> None:
    recipe = Recipe()
    setattr(getattr(recipe, section), name, value)
    with pytest.raises(RecipeError, match=f"{section}.{name}"):
        served_recipe(recipe)


def test_the_directory_of_a_run_is_refused_without_a_resume(tmp_path: Path) -> None:
    """It starts from model.path, so that a resume could not go on with the run."""
    recipe = Recipe()
    recipe.runs_dir, recipe.name = str(tmp_path), "trained"
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "metrics.jsonl").write_text('{"step": 1}\n')
    survey = Survey(recipe)
    _check_settings(survey)
    (error,) = [error for error in survey.errors if "already holds a run" in str(error)]
    assert isinstance(error, RecipeError) and error.key == "name"
    assert error.remedy == "set name=... for another directory, or move it away"


def test_sections_of_a_training_run_do_not_count() -> None:
    recipe = Recipe()
    recipe.algorithm.kl_coef, recipe.rollout.temperature, recipe.rollout.max_staleness = 0.5, 0.7, 2
    served = served_recipe(recipe)
    assert served.algorithm.kl_coef == Recipe().algorithm.kl_coef != 0.5
    assert served.rollout.temperature == 1.0 and served.rollout.max_staleness == 0 and served.rollout.seeded is True
    assert recipe.algorithm.kl_coef == 0.5, "the recipe itself has changed"
