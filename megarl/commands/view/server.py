"""The page's files and its data over HTTP. docs/view.md lists the addresses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.commands.view.access import Access
from megarl.observe.json_lines import json_line
from megarl.observe.page.bundle import static_files, static_text
from megarl.observe.page.sample_pages import SampleFilter
from megarl.observe.page.viewed_run import ViewedRun, chart_list, recipe_table

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_CURVES = 64  # in one request
MAX_SMOOTHING = 0.999


def make_app(runs: Sequence[ViewedRun], *, follow: bool, token: str, host: str, port: int) -> Starlette:
    """Return the server of the page. follow: the page asks for new lines every second from the start."""
    data = _Data(runs, follow)
    routes = [
        Route("/", _static("index.html")),
        *(Route(f"/static/{name}", _static(name)) for name in static_files()),
        *(Route(f"/api/{path}", _json(answer)) for path, answer in data.answers().items()),
    ]
    access = Middleware(Access, token=token, host=host, port=port)
    return Starlette(routes=routes, middleware=[access], exception_handlers={HTTPException: _error})


class _Data:
    """The answers of the API: each function receives a request and returns an object for JSON."""

    def __init__(self, runs: Sequence[ViewedRun], follow: bool) -> None:
        self._runs, self._follow = list(runs), follow

    def answers(self) -> dict[str, Callable[[Request], dict[str, Any]]]:
        return {
            "runs": self._list,
            "state": lambda request: {"runs": [run.state() for run in self._runs]},
            "charts": lambda request: chart_list(self._runs),
            "recipes": lambda request: recipe_table(self._runs),
            "runs/{run:int}/overview": lambda request: self._run(request).overview(),
            "runs/{run:int}/curves": self._curves,
            "runs/{run:int}/sources": lambda request: self._run(request).sources(),
            "runs/{run:int}/phases": lambda request: self._run(request).phases(),
            "runs/{run:int}/notices": lambda request: self._run(request).notices(_integer(request, "first", 0)),
            "runs/{run:int}/sample_steps": lambda request: {"steps": self._run(request).sample_steps()},
            "runs/{run:int}/samples": self._samples,
            "runs/{run:int}/sample": lambda request: self._run(request).sample(
                _integer(request, "step"), _integer(request, "offset")
            ),
        }

    def _list(self, request: Request) -> dict[str, Any]:
        runs = [{"id": run.number, "label": run.label, "path": str(run.run_dir.path)} for run in self._runs]
        return {"follow": self._follow, "runs": runs}

    def _curves(self, request: Request) -> dict[str, Any]:
        names = request.query_params.getlist("name")
        if len(names) > MAX_CURVES:
            raise ValueError(f"{len(names)} curves in one request; at most {MAX_CURVES} are allowed")
        smoothing = _number(request, "smoothing") or 0.0
        if not 0 <= smoothing <= MAX_SMOOTHING:
            raise ValueError(f"smoothing must be between 0 and {MAX_SMOOTHING}, got {smoothing:g}")
        x = _choice(request, "x", ("step", "hours"))
        since = None
        if "epoch" in request.query_params:
            since = (_integer(request, "epoch"), _integer(request, "lines"))
        return self._run(request).curves(names, smoothing=smoothing, x=x, since=since)

    def _samples(self, request: Request) -> dict[str, Any]:
        staleness = _integer(request, "staleness", -1)
        conditions = SampleFilter(
            least=_number(request, "least"),
            most=_number(request, "most"),
            source=request.query_params.get("source", ""),
            finish=request.query_params.get("finish", ""),
            text=request.query_params.get("text", ""),
            tools=_choice(request, "tools", ("", "called", "failed")),
            spread=_choice(request, "spread", ("", "some", "none")),
            staleness=staleness if staleness >= 0 else None,
        )
        start = None
        if "step" in request.query_params:
            start = (_integer(request, "step"), _integer(request, "offset", 0))
        return asdict(self._run(request).samples(start, conditions))

    def _run(self, request: Request) -> ViewedRun:
        number: int = request.path_params["run"]
        if number >= len(self._runs):
            raise HTTPException(404, f"run {number} does not exist; this page has {len(self._runs)} runs, from 0")
        return self._runs[number]


def _json(answer: Callable[[Request], Mapping[str, Any]]) -> Callable[[Request], Response]:
    """Return the endpoint that sends `answer` as JSON. Starlette runs it in a thread, because it reads files."""

    def endpoint(request: Request) -> Response:
        try:
            return Response(_encoded(answer(request)), media_type="application/json")
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except OSError as error:
            raise HTTPException(
                503, f"{error.filename or 'a file of the run'} could not be read: {error.strerror}"
            ) from error

    return endpoint


def _encoded(answer: Mapping[str, Any]) -> bytes:
    """Return strict JSON. Curves have no NaN, so that `json_line` need not look at each of their points."""
    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json_line(dict(answer))
    return text.encode("utf-8", "backslashreplace")


def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(json_line({"error": error.detail}), error.status_code, media_type="application/json")


def _static(name: str) -> Callable[[Request], Response]:
    content = static_text(name).encode()
    kind = _TYPES[name[name.rindex(".") :]]

    def endpoint(request: Request) -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return endpoint


def _integer(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None
    if abs(value) >= 1 << 62:
        raise ValueError(f"{name} must have at most 62 bits, got {text!r}")
    return value


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    text = request.query_params.get(name, choices[0])
    if text not in choices:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}, got {text!r}")
    return text
