"""The HTTP side of `megarl serve` with stand-in trainers and engines, which answer at once.

Usage, to record the requests of an installed client for tests/fixtures/tinker: python -m tests.support.tinker_api FILE
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.algorithms.datum_losses import checked_loss
from megarl.batching.datums import AdamParams, Datum, DatumScores
from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.calls import TrainerCalls
from megarl.commands.serve.server import make_app
from megarl.commands.serve.states import SavedState
from megarl.types import Completion, TokenScores

NAME, KEY = "org/tiny", "tml-" + "k" * 20
LONGEST, VOCAB = 64, 100


class StandInSession:
    """Log-prob of a target: minus its id over 100. A sample: the tokens 7, 8, ..., one more than its number."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.model = SimpleNamespace(
            longest_sample=LONGEST, config={"model_type": "tiny"}, directory=SimpleNamespace(path=folder)
        )
        lora = SimpleNamespace(rank=rank, targets=["all-linear"])
        self.recipe = SimpleNamespace(lora=lora, train=SimpleNamespace(seed=0))
        self.version, self.updates, self.passes, self.is_fresh = 0, 0, 0, True
        self.sampled_updates: int | None = 0
        self.states = self
        self.saved: dict[tuple[str, str], int] = {}
        self.calls: list[Any] = []

    def forward(self, data: list[Datum], loss: str, options: Any) -> DatumScores:
        checked = checked_loss(loss, options)
        for datum in data:
            if missing := set(checked.inputs) - set(datum.vectors):
                raise ValueError(f"lacks {missing}")
        self.calls.append((loss, len(data)))
        scores = {number: (-datum.targets / 100).astype(np.float32) for number, datum in enumerate(data)}
        return DatumScores(float(-sum(vector.sum() for vector in scores.values())), scores)

    def forward_backward(self, data: list[Datum], loss: str, options: Any) -> DatumScores:
        scores = self.forward(data, loss, options)
        self.passes += 1
        return scores

    def optim_step(self, params: AdamParams) -> float:
        if not self.passes:
            raise ValueError("optim_step has no gradient")
        self.calls.append(params)
        self.updates, self.passes, self.is_fresh = self.updates + 1, 0, False
        return 2.5

    def forget_gradients(self) -> None:
        self.passes = 0

    def check_publishable(self) -> None: ...

    def publish(self) -> int:
        self.version, self.sampled_updates = self.version + 1, self.updates
        return self.version

    def begin_sample(self, prompt: list[int], params: Any, count: int, version: int) -> Future[list[Completion]]:
        if version != self.version:
            raise ValueError("the engines no longer have these weights")
        self.calls.append(params)
        scores = None
        if params.prompt_top_k is not None:
            tops = np.zeros((len(prompt), params.prompt_top_k))
            scores = TokenScores(np.full(len(prompt), -0.5, np.float32), tops.astype(np.int32), tops.astype(np.float32))
        done: Future[list[Completion]] = Future()
        tokens = [np.arange(7, 8 + number, dtype=np.int32) for number in range(count)]
        done.set_result(
            [Completion(each, np.full(len(each), -1.0, np.float32), "stop", None, scores) for each in tokens]
        )
        return done

    def save_state(self, model: str, name: str, **how: Any) -> None:
        self.saved[model, name] = self.updates
        self.calls.append(("save", name, how))

    def find(self, model: str, name: str) -> SavedState:
        if (model, name) not in self.saved:
            raise ValueError(f"the state {name!r} of {model} does not exist")
        return SavedState(Path(model) / name, {})

    def load_state(self, saved: SavedState, *, with_optimizer: bool) -> None:
        self.calls.append(("load", saved.path.name, with_optimizer))
        self.is_fresh = False

    def export(self, folder: Path) -> None:
        folder.mkdir()

    def reset(self) -> None:
        self.is_fresh = True


@contextlib.contextmanager
def stand_in_api(folder: Path, rank: int = 0) -> Iterator[TrainingApi]:
    """An API with a thread for the trainers' calls."""
    calls = TrainerCalls()
    api = TrainingApi(StandInSession(folder, rank), NAME, calls)  # type: ignore[arg-type]
    thread = threading.Thread(target=calls.serve, args=(lambda: None,))
    thread.start()
    try:
        yield api
    finally:
        calls.stop.set()
        thread.join()


class _Recorder:
    """Writes each request, without what differs between machines."""

    def __init__(self, app: Any) -> None:
        self.app, self.requests = app, []  # type: ignore[var-annotated]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].endswith(("telemetry", "session_heartbeat")):
            await self.app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: headers[name] for name in ("content-type", "accept") if name in headers}
        parts = []

        async def reading() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        await self.app(scope, reading, send)
        body = base64.b64encode(b"".join(parts)).decode()
        self.requests.append({"method": scope["method"], "path": scope["path"], "headers": kept, "body": body})


def record(file: Path) -> None:
    """Let the installed client go through a training loop, and write its requests."""
    import tinker
    import uvicorn
    from tinker import types

    listener = socket.create_server(("127.0.0.1", 0))
    os.environ |= {"TINKER_BASE_URL": f"http://127.0.0.1:{listener.getsockname()[1]}", "TINKER_API_KEY": KEY}
    with tempfile.TemporaryDirectory() as folder, stand_in_api(Path(folder)) as api:
        recorder = _Recorder(make_app(api, KEY))
        server = uvicorn.Server(uvicorn.Config(recorder, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        service = tinker.ServiceClient()
        client = service.create_lora_training_client(base_model=NAME, rank=0).result()
        tokens = types.ModelInput.from_ints([5, 6, 7])
        weighted = types.Datum(tokens, {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 0.5]})
        sampled = {"target_tokens": [0, 7, 8], "advantages": [0.0, 1.0, -1.0], "logprobs": [0.0, -1.0, -2.0]}
        passes = client.forward_backward([weighted, weighted], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-3))
        passes.result(), step.result()
        client.forward_backward([types.Datum(tokens, sampled)], "ppo", {"clip_low_threshold": 0.7}).result()
        client.forward([weighted], "cross_entropy").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        sampler.sample(tokens, 2, types.SamplingParams(max_tokens=4, stop=[2]), True, 3).result()
        sampler.compute_logprobs(tokens).result()
        state = client.save_state("one", ttl_seconds=3600).result()
        path = client.save_weights_for_sampler("two").result().path
        service.create_sampling_client(model_path=path).result()
        service.close("success").result()
        again = tinker.ServiceClient()
        again.create_training_client_from_state_with_optimizer(state.path).result()
        again.close("success").result()
        server.should_exit = True
        thread.join()
    recorded = {"client": tinker.__version__, "requests": recorder.requests}
    file.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
