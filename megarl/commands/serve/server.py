"""The Tinker API over HTTP. docs/serve.md lists the operations."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.calls import CallAnswer, ServerEnds, TooManyCalls
from megarl.commands.serve.clients import UnknownId
from megarl.commands.serve.fields import read_fields

MOST_JSON_BYTES, MOST_PASS_BYTES = 16 << 20, 256 << 20
LOOK_SECONDS = 20.0  # a client waits 45 for the answer of a look
_PROTOBUF = "application/x-protobuf"
_CLIENT = "this server speaks the protocol of tinker 0.38; install that version or a later one"
_DISCARDED = "telemetry"  # the body of this operation is not read
_SETTINGS = {  # of the client
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    "sample_enable_stuck_detection": False,  # a sample may wait for the trainers
    "use_pyqwest_transport": False,
}

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(api: TrainingApi, token: str) -> Starlette:
    """Return the server of the API; every request needs the token."""
    routes = _Routes(api).routes()
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        TooManyCalls: _busy,
        ServerEnds: _ends,
        UnknownId: _unknown,
        ValueError: _refused,
        Exception: _failed,
    }
    return Starlette(routes=routes, middleware=[Middleware(TokenCheck, token=token)], exception_handlers=handlers)


class TokenCheck:
    """Passes requests with the token in the header ``X-API-Key``."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = b"".join(value for name, value in scope["headers"] if name == b"x-api-key")
            if not hmac.compare_digest(key, self._token):
                error = "wrong key: set TINKER_API_KEY to the key that `megarl serve` has printed"
                await JSONResponse({"error": error}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Routes:
    def __init__(self, api: TrainingApi) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        api = self._api
        capabilities = {
            "supported_models": [
                {
                    "model_name": api.name,
                    "max_context_length": api.session.model.longest_sample,
                    "trainable": True,
                    "sampleable": True,
                }
            ]
        }
        posts: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "client/config": lambda body: _SETTINGS,
            "client/dynamic_config": lambda body: {"refresh_interval_sec": 3600, "sample_cancel_enabled": False},
            "create_session": api.create_session,
            "session_heartbeat": self._heartbeat,
            _DISCARDED: lambda body: {"status": "accepted"},
            "create_model": lambda body: _promise(*api.create_model(body)),
            "get_info": lambda body: api.info(body["model_id"]),
            "optim_step": lambda body: _promise(api.optim_step(body)),
            "save_weights": lambda body: _promise(api.save_weights(body)),
            "load_weights": lambda body: _promise(*api.load_weights(body)),
            "save_weights_for_sampler": lambda body: _promise(api.save_for_sampler(body)),
            "asample": self._sample,
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "healthz": lambda request: {"status": "ok"},
            "get_server_capabilities": lambda request: capabilities,
            "samplers/{sampler}": lambda request: api.sampler(request.path_params["sampler"]),
        }
        routes = [
            Route(f"/api/v1/{path}", self._json_post(path, answer), methods=["POST"]) for path, answer in posts.items()
        ]
        routes += [Route(f"/api/v1/{path}", _json_get(answer), methods=["GET"]) for path, answer in gets.items()]
        waits: dict[str, Endpoint] = {
            "forward_backward": self._pass,
            "create_sampling_session": self._create_sampler,
            "retrieve_future": self._retrieve,
            "sessions/{session}/finish": self._finish,
        }
        routes += [Route(f"/api/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in waits.items()]
        return [*routes, Route("/{path:path}", self._no_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]

    def _json_post(self, name: str, answer: Callable[[Mapping[str, Any]], Any]) -> Endpoint:
        def answer_checked(body: dict[str, Any]) -> Any:
            try:
                return answer(body if name == _DISCARDED else read_fields(name, body))
            except ValueError:
                self._api.note_refused(body)
                raise

        async def endpoint(request: Request) -> Response:
            body = _object(await _body(request, MOST_JSON_BYTES))
            return JSONResponse(await run_in_threadpool(answer_checked, body))

        return endpoint

    async def _no_route(self, request: Request) -> Response:
        with contextlib.suppress(HTTPException):
            self._api.note_refused(_object(await _body(request, MOST_JSON_BYTES)))
        operation = f"{request.method} {request.url.path}"
        raise HTTPException(
            404, f"{operation}: `megarl serve` does not have this operation; docs/serve.md lists its operations"
        )

    def _heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._api.sessions.touch(body["session_id"]).finished:
            raise HTTPException(410, "the session has been finished")
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        await _body(request, MOST_JSON_BYTES)
        self._api.finish_session(request.path_params["session"])
        return JSONResponse({})

    def _sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        request_id, names = self._api.sample(body)
        return {"request_id": request_id, "sample_sequence_ids": names}

    async def _pass(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if kind != _PROTOBUF or "content-encoding" in request.headers:
            raise HTTPException(415, f"forward_backward has a body of type {kind!r}, not plain {_PROTOBUF}; {_CLIENT}")
        body = await _body(request, MOST_PASS_BYTES)
        return JSONResponse(_promise(await run_in_threadpool(self._api.run_pass, body)))

    async def _create_sampler(self, request: Request) -> Response:
        body = read_fields("create_sampling_session", _object(await _body(request, MOST_JSON_BYTES)))
        future = self._api.calls.submit(self._api.create_sampler(body))
        answer = await asyncio.shield(asyncio.wrap_future(future))
        if answer.error is not None:
            raise HTTPException(400 if answer.by_caller else 500, answer.error)
        return Response(answer.body, media_type="application/json")

    async def _retrieve(self, request: Request) -> Response:
        """Return the answer of a call, or 408 after a while: the client asks again."""
        body = read_fields("retrieve_future", _object(await _body(request, MOST_JSON_BYTES)))
        request_id: str = body["request_id"]
        future = self._api.answer(request_id)
        try:
            answer: CallAnswer = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), LOOK_SECONDS)
        except asyncio.TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        self._api.answers.fetched(request_id, len(answer.body))
        if answer.error is not None:
            return JSONResponse({"error": answer.error, "category": "user" if answer.by_caller else "server"})
        if not answer.is_protobuf:
            return Response(answer.body, media_type="application/json")
        if _PROTOBUF not in request.headers.get("accept", ""):
            raise HTTPException(406, f"the answer is {_PROTOBUF}, which the request does not accept; {_CLIENT}")
        return Response(answer.body, media_type=_PROTOBUF)


def _json_get(answer: Callable[[Request], Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(answer(request))

    return endpoint


async def _body(request: Request, most: int) -> bytes:
    """Read the body. Raises HTTPException if it is longer than `most` bytes."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise HTTPException(
                    413, f"the body has more than {most >> 20} MiB; send fewer or shorter data in one request"
                )
            parts.append(part)
    except ClientDisconnect:
        raise HTTPException(400, "the client has gone before the end of its body") from None
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HTTPException(400, f"the body is JSON of type {type(value).__name__}; it must be an object")
    return value


def _promise(request_id: str, model_id: str | None = None) -> dict[str, Any]:
    return {"request_id": request_id} | ({} if model_id is None else {"model_id": model_id})


def _answered(status: int, request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status)


def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"the server failed, see its output: {type(error).__name__}: {error}"}, 500)


_busy = functools.partial(_answered, 429)
_ends = functools.partial(_answered, 503)
_unknown = functools.partial(_answered, 404)
_refused = functools.partial(_answered, 400)
