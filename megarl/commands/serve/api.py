"""The state of the API: client sessions, the model in training, samplers. One tenant: one model at a time."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megarl.commands.serve import codec
from megarl.commands.serve.calls import CallAnswer, CallAnswers, TrainerCalls, settle
from megarl.commands.serve.clients import ALIVE_SECONDS, ClientSessions, ServedSampler, TrainedModel, UnknownId
from megarl.commands.serve.fields import is_integer, read_fields
from megarl.commands.serve.session import TrainingSession
from megarl.commands.serve.states import ExportStore, check_name
from megarl.types import Completion

_SCHEME = "tinker://"


class TrainingApi:
    """The operations behind the routes. `name`: of the model for clients. Thread-safe; the trainers' calls run in `calls.serve`."""

    def __init__(self, session: TrainingSession, name: str, calls: TrainerCalls) -> None:
        self.session, self.name, self.calls = session, name, calls
        self.sessions = ClientSessions()
        self.answers = CallAnswers(self.sessions.has_ended)
        self.exports = ExportStore(session.model.directory.path / "sampler_weights")
        self.rank = session.recipe.lora.rank
        self._lock = threading.RLock()
        self._model: TrainedModel | None = None
        self._samplers: dict[str, ServedSampler] = {}
        self._named: dict[str, int] = {}  # path of sampler weights -> version
        self._base_version: int | None = session.version  # of the starting model in the engines; None: they have others

    # --- sessions -------------------------------------------------------------------------------

    def create_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of create_session; the client logs the warning."""
        self.answers.forget_ended()
        session, warnings = self.sessions.create(), []
        if self.rank:
            targets = ", ".join(self.session.recipe.lora.targets)
            warnings.append(f"adapters are on {targets} (lora.targets), and none on the unembedding")
        if "project_id" in body:
            warnings.append(f"project_id {body['project_id']!r} is not used: this server has no projects")
        answer = {"type": "create_session", "session_id": session}
        return answer | ({"warning_message": "; ".join(warnings)} if warnings else {})

    def finish_session(self, session: str) -> None:
        """End a session; its model may be replaced, and its answers are forgotten."""
        self.sessions.touch(session).finished = True
        self.answers.forget_ended()

    # --- models ---------------------------------------------------------------------------------

    def create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Start training a new model from the starting weights. Returns the ids of request and model. Raises ValueError."""
        self._check_name(body["base_model"])
        self._check_lora(read_fields("lora_config", body.get("lora_config", {"rank": 0})))
        self._check_optimizer(body)
        model = self._new_model(body)

        def create() -> CallAnswer:
            self.session.reset()
            return _json({"type": "create_model", "model_id": model.id})

        return self._submit(model, "create_model", 0, _starting(model, create)), model.id

    def _new_model(self, body: Mapping[str, Any]) -> TrainedModel:
        """Return the model of (session_id, model_seq_id), which becomes the model in training. Raises ValueError if there is one."""
        session: str = body["session_id"]
        self.sessions.touch(session)
        new = f"{session}:train:{body['model_seq_id']}"
        with self._lock:
            held = self._model
            if held is not None and held.id == new:
                return held
            if held is not None and held.failed_start is None and not self.sessions.has_ended(held.session):
                raise ValueError(
                    f"this server trains one model at a time, and {held.id} is in training. End its session first "
                    f"(service_client.close('success')), or wait {ALIVE_SECONDS:.0f} s after its client has ended"
                )
            self._model = TrainedModel(new, session)
            return self._model

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ValueError(f"base_model is {name!r}; this server has {self.name!r}")

    def _check_lora(self, config: Mapping[str, Any]) -> None:
        rank, layers = config["rank"], ("train_mlp", "train_attn", "train_unembed")
        if rank != self.rank:
            trains = f"adapters of rank {self.rank}" if self.rank else "all weights (rank 0)"
            raise ValueError(
                f"rank is {rank}, and this server trains {trains}: create the client with rank={self.rank}, or serve the recipe with "
                f"lora.rank={rank}"
            )
        if off := [name for name in layers if not config.get(name, True)]:
            where = (
                "lora.targets of the served recipe decides where adapters are"
                if self.rank
                else "this server trains all weights"
            )
            raise ValueError(f"{', '.join(off)}: {where}; leave {', '.join(layers)} at True")
        seed = config.get("seed")
        if seed is not None and seed != self.session.recipe.train.seed:
            raise ValueError(
                f"seed is {seed}; adapters start from train.seed={self.session.recipe.train.seed} of the recipe"
            )

    @staticmethod
    def _check_optimizer(body: Mapping[str, Any]) -> None:
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise ValueError(f"optimizer_config has type {kind!r}; this server updates with adamw")

    def model(self, model_id: str) -> TrainedModel:
        """Return the model in training. Raises UnknownId for another one."""
        held = self._model
        if held is None or held.id != model_id:
            raise UnknownId(f"model {model_id!r} is not in training on this server; create a new training client")
        self.sessions.touch(held.session)
        return held

    def info(self, model_id: str) -> dict[str, Any]:
        """Return the answer of get_info."""
        model = self.model(model_id)
        data = {"arch": self.session.model.config.get("model_type"), "model_name": self.name, "tokenizer_id": self.name}
        lora = {"is_lora": bool(self.rank), "lora_rank": self.rank or None}
        return {"type": "get_info", "model_data": data, "model_id": model.id, "model_name": self.name, **lora}

    # --- training -------------------------------------------------------------------------------

    def run_pass(self, body: bytes) -> str:
        """Queue a forward or forward_backward call. Returns the request id. Raises ValueError for a damaged body."""
        message = codec.pass_header(body)
        model = self.model(message.model_id)

        def run() -> CallAnswer:
            try:
                request = codec.pass_request(message)
                call = self.session.forward if request.forward_only else self.session.forward_backward
                scores = call(request.data, request.loss, request.options)
            except ValueError as error:
                model.broken = model.broken if message.forward_only else str(error)
                raise
            return CallAnswer(codec.pass_output(scores, len(request.data)), is_protobuf=True)

        return self._submit(model, "forward" if message.forward_only else "forward_backward", message.seq_id, run)

    def optim_step(self, body: Mapping[str, Any]) -> str:
        model = self.model(body["model_id"])

        def run() -> CallAnswer:
            params = codec.adam_params(body)
            if model.broken is not None:
                cause, model.broken = model.broken, None
                if self.session.passes:
                    self.session.forget_gradients()
                raise ValueError(
                    f"no update: a forward_backward call before it failed, and all gradients are forgotten ({cause})"
                )
            return _json({"metrics": {"grad_norm": self.session.optim_step(params)}})

        return self._submit(model, "optim_step", body["seq_id"], run)

    def save_weights(self, body: Mapping[str, Any]) -> str:
        """Queue save_state. Raises ValueError."""
        model, name = self.model(body["model_id"]), body["path"]
        seconds = codec.lifetime(body)

        def run() -> CallAnswer:
            how = {"overwrite": body.get("overwrite", False), "seconds": seconds}
            self.session.save_state(model.folder, name, metadata=body.get("user_metadata"), **how)
            return _json({"type": "save_weights", "path": f"{_SCHEME}{model.id}/weights/{name}"})

        return self._submit(model, "save_weights", body["seq_id"], run)

    def load_weights(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Queue load_state, into the model in training or a new one. Returns the ids of request and model. Raises ValueError.

        The queued call looks for the state: calls before it may save, replace or delete it.
        """
        path, with_optimizer = body["path"], body["optimizer"]
        if body.get("weights_access_token"):
            raise ValueError("weights_access_token is set; this server has one account: leave it out")
        owner, name = _parts(path, "weights")
        folder, is_new = owner.replace(":", "-"), "session_id" in body
        names = ("session_id", "model_seq_id", "model_id", "seq_id")
        if tuple(name for name in names if name in body) != (names[:2] if is_new else names[2:]):
            raise ValueError(
                "load_weights needs session_id and model_seq_id for a new model, or model_id and seq_id for one in training"
            )
        for part in (folder, name):
            check_name(part)
        self._check_name(body.get("base_model", self.name))
        self._check_optimizer(body)
        model, number = (self._new_model(body), 0) if is_new else (self.model(body["model_id"]), body["seq_id"])

        def run() -> CallAnswer:
            self.session.load_state(self.session.states.find(folder, name), with_optimizer=with_optimizer)
            model.broken = None
            return _json({"type": "load_weights", "path": path, "model_id": model.id})

        return self._submit(model, "load_weights", number, _starting(model, run) if is_new else run), model.id

    # --- samplers -------------------------------------------------------------------------------

    def save_for_sampler(self, body: Mapping[str, Any]) -> str:
        """Queue the weight sync to the engines; with a name also the export of the model. Raises ValueError."""
        model, name = self.model(body["model_id"]), body.get("path")
        kind, seconds = body.get("kind", "snapshot"), codec.lifetime(body)

        def run() -> CallAnswer:
            if kind != "snapshot":
                raise ValueError(
                    f"kind is {kind!r}; this server has 'snapshot' alone: engines sample with the newest saved weights"
                )
            self.session.check_publishable()
            path = None
            if name is not None:
                about = {"seconds": seconds, "metadata": body.get("user_metadata")}
                self.session.export(self.exports.place(model.folder, name, **about))
                path = f"{_SCHEME}{model.id}/sampler_weights/{name}"
            version = self._publish()
            if path is not None:
                self._named[path] = version
                return _json({"type": "save_weights_for_sampler", "path": path})
            return _json(
                {
                    "type": "save_weights_for_sampler",
                    "sampling_session_id": self._new_sampler(model.session, version).id,
                }
            )

        return self._submit(model, "save_weights_for_sampler", body["seq_id"], run)

    def _publish(self) -> int:
        """Send the weights to the engines, unless they have them."""
        session = self.session
        if session.sampled_updates != session.updates:
            session.publish()
            self._base_version = session.version if session.is_fresh else None
        return session.version

    def create_sampler(self, body: Mapping[str, Any]) -> Callable[[], CallAnswer]:
        """Return the call that creates a sampling session, for the thread of the trainers. Raises ValueError."""
        session: str = body["session_id"]
        self.sessions.touch(session)
        path, base = body.get("model_path"), body.get("base_model")
        if path is not None:
            _parts(path, "sampler_weights")
        if path is None or base is not None:
            self._check_name(str(base))

        def run() -> CallAnswer:
            version = self._named.get(path) if path is not None else self._base()
            if version != self.session.version or self.session.sampled_updates is None:
                raise ValueError(
                    f"{path or base} cannot be sampled now: the engines hold one version of the weights, and this is not it. Call "
                    "save_weights_for_sampler again"
                )
            sampler = self._new_sampler(session, version, path)
            return _json({"type": "create_sampling_session", "sampling_session_id": sampler.id})

        return run

    def _base(self) -> int | None:
        """Return the version of the starting model, which is published if the trainers still have it and the engines do not."""
        if self.session.is_fresh and (self._base_version is None or self.session.sampled_updates is None):
            self._publish()
        return self._base_version

    def _new_sampler(self, session: str, version: int, path: str | None = None) -> ServedSampler:
        sampler = ServedSampler(f"sampler-{secrets.token_hex(8)}", session, version, path)
        with self._lock:
            self._samplers[sampler.id] = sampler
        return sampler

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        """Return a sampler's description. Raises UnknownId."""
        return {"sampler_id": sampler_id, "base_model": self.name, "model_path": self._sampler(sampler_id).path}

    def _sampler(self, sampler_id: str) -> ServedSampler:
        with self._lock:
            if sampler_id not in self._samplers:
                raise UnknownId(
                    f"sampling session {sampler_id!r} is unknown; they end with the server: create a new one"
                )
            return self._samplers[sampler_id]

    def sample(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Start sampling. Returns the id of the request, and an id for each response. Raises ValueError and TooManyCalls."""
        call = codec.sample_call(body, self.session.model.longest_sample)
        sampler = self._sampler(call.session)
        self.sessions.touch(sampler.session)
        request_id = f"{sampler.id}:sample:{call.seq_id}"
        names = [f"{request_id}:{number}" for number in range(call.count)]
        with self._lock:
            if self.answers.get(request_id) is not None:
                return request_id, names  # sent again
            self.calls.check_open()
            self.answers.make_room()
            answer: Future[CallAnswer] = Future()
            running = self.session.begin_sample(call.prompt, call.params, call.count, sampler.version)
            self.answers.add(request_id, sampler.session, answer)

        def finish(done: Future[list[Completion]]) -> None:
            error = done.exception()
            if error is not None:
                settle(answer, CallAnswer(error=f"{type(error).__name__}: {error}"))
            else:
                settle(answer, CallAnswer(codec.sample_output(call, done.result()), is_protobuf=True))

        running.add_done_callback(finish)
        return request_id, names

    def end(self, error: str) -> None:
        """Answer all calls that run or wait with `error`, and refuse new ones."""
        self.calls.end(error)
        with self._lock:  # no call is between its check and its place among the answers
            self.answers.end(error)

    def answer(self, request_id: str) -> Future[CallAnswer]:
        """Return the answer of a call, and note a sign of life of its client. Raises UnknownId."""
        kept = self.answers.get(request_id)
        if kept is None:
            raise UnknownId(
                f"the answer of request {request_id!r} is not here: it was fetched before, its session has ended, or the server has "
                "restarted"
            )
        self.sessions.touch(kept.session)
        return kept.future

    def note_refused(self, body: Mapping[str, Any]) -> None:
        """Note the number of a refused call of the model in training, which is not missing before the next one."""
        model, number = self._model, body.get("seq_id")
        if model is not None and body.get("model_id") == model.id and is_integer(number):
            with self._lock:
                model.refused.add(number)

    def _submit(self, model: TrainedModel, operation: str, number: int, call: Callable[[], CallAnswer]) -> str:
        """Queue a call of `model`; a call that the client sends again keeps its answer. Raises TooManyCalls, and ValueError for a
        number of another call. Calls that are missing before this one may have been passes: the next update is refused."""
        request_id = f"{model.id}:{number}"

        def run() -> CallAnswer:
            if model.failed_start is not None:
                raise ValueError(f"{model.id} has no weights: {model.failed_start}. Create a new training client")
            if missing:
                model.broken = f"{missing}: a forward_backward may be missing"
            return call()

        with self._lock:
            if number < 0 or model.calls.get(number, operation) != operation:
                raise ValueError(
                    f"{operation} of {model.id} has seq_id {number}, the number of {model.calls.get(number, 'no call')}: number its calls "
                    "from 1 on, without a gap"
                )
            missing = model.missing_before(number)
            if number not in model.calls:
                self.answers.make_room()
                self.answers.add(request_id, model.session, self.calls.submit(run))
                model.note(number, operation)
        return request_id


def _starting(model: TrainedModel, call: Callable[[], CallAnswer]) -> Callable[[], CallAnswer]:
    """Return `call`, which gives `model` its first weights. If it fails, another model may take the place of `model`."""

    def run() -> CallAnswer:
        try:
            return call()
        except ValueError as error:
            model.failed_start = str(error)
            raise

    return run


def _json(value: dict[str, Any]) -> CallAnswer:
    return CallAnswer(json.dumps(value).encode())


def _parts(path: str, kind: str) -> tuple[str, str]:
    """Return model and name of ``tinker://MODEL/KIND/NAME``. Raises ValueError for another path."""
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] != kind:
        raise ValueError(f"the path is {path!r}; it must be tinker://MODEL/{kind}/NAME")
    return parts[0], parts[2]
