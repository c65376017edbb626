"""Reward service over HTTP: it receives a sample as JSON and answers with a scorer's result as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import json
import os
import random
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.recipe.remote import RemoteConfig
from megarl.rewards.base import ScoreRequest, ScorerUnavailable, scorer
from megarl.rewards.settings import ScorerSettings

if TYPE_CHECKING:
    import httpx
    import tenacity

MOST_BYTES = 1 << 20  # of an answer
SHOWN = 300  # characters of an answer in an error
TOO_MANY = 429


class ServiceError(RuntimeError):
    """The service did not score a sample, and another request would not help."""


class _Retryable(Exception):
    """A failure that another request may fix. `after`: seconds to wait, if the service names them."""

    def __init__(self, cause: str, after: float | None = None) -> None:
        super().__init__(cause)
        self.after = after


def prepare(settings: ScorerSettings) -> None:
    """Import the HTTP libraries and check that the headers' values are set. Raises ValueError if one is not."""
    import httpx
    import tenacity

    assert httpx and tenacity
    _headers(settings.remote)


@scorer("remote", prepare=prepare, settings=True, needs_ground_truth=False)
async def remote(request: ScoreRequest, settings: ScorerSettings) -> Any:
    """Return the answer of the service at reward.remote.url.

    Raises ScorerUnavailable after the last attempt, and ServiceError at a 4xx other than 429 and if the answer is not JSON.
    """
    return await ask(settings.remote, dataclasses.asdict(request))


async def ask(service: RemoteConfig, values: dict[str, Any]) -> Any:
    """Post `values` as JSON and return the service's JSON. Raises ServiceError as `remote`."""
    import httpx
    import tenacity

    body = json.dumps(values, allow_nan=False, default=_plain).encode()
    requests = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(service.attempts),
        wait=_Wait(service),
        retry=tenacity.retry_if_exception_type(_Retryable),
        reraise=True,
    )
    client = _client(service, httpx)
    try:
        return await requests(_request, client, service, body)
    except _Retryable as error:
        times = f" ({service.attempts} requests)" if service.attempts > 1 else ""
        raise ScorerUnavailable(f"{error}{times}", error.after or 0.0) from error


async def _request(client: httpx.AsyncClient, service: RemoteConfig, body: bytes) -> Any:
    import httpx

    assert service.url is not None, "preflight rejects a recipe without a URL"
    try:
        status, headers, answer = await asyncio.wait_for(_post(client, service.url, body), service.timeout)
    except (asyncio.TimeoutError, httpx.TimeoutException) as error:
        raise _Retryable(f"no answer within {service.timeout:g} s") from error
    except httpx.TransportError as error:
        raise _Retryable(f"no connection: {type(error).__name__}: {error}") from error
    if status == TOO_MANY or status >= 500:
        raise _status_error(status, headers.get("retry-after"), answer, service)
    if 300 <= status < 400:
        target = headers.get("location", "nowhere")[:SHOWN]
        raise ServiceError(
            f"it answered {status}, see {target}: set reward.remote.url to the final URL, redirects are not followed"
        )
    if status != httpx.codes.OK:
        raise ServiceError(f"it answered {status}: {_shown(answer)}")
    if len(answer) > MOST_BYTES:
        raise ServiceError(f"its answer has more than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"its answer is not JSON ({error}): {_shown(answer)}") from error


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[int, httpx.Headers, bytes]:
    """Return status, headers and body; the body is cut one byte after MOST_BYTES."""
    async with client.stream("POST", url, content=body) as response:
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > MOST_BYTES:
                break
        return response.status_code, response.headers, bytes(answer[: MOST_BYTES + 1])


def _status_error(status: int, retry_after: str | None, answer: bytes, service: RemoteConfig) -> Exception:
    cause = f"it answered {status}: {_shown(answer)}"
    after = _seconds(retry_after) if status in (TOO_MANY, 503) else None
    if after is not None and after > service.longest_wait:
        limit = f"reward.remote.longest_wait is {service.longest_wait:g}"
        return ScorerUnavailable(f"{cause}; it asks for {after:.0f} s of waiting, and {limit}", after)
    return _Retryable(cause, after)


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3), a number or a date; None if it is neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


class _Wait:
    """Seconds before the next request.

    If the service sent Retry-After: its seconds plus a random part, so that clients do not all return at once.
    Otherwise exponential backoff with full jitter.
    """

    def __init__(self, service: RemoteConfig) -> None:
        self.service = service

    def __call__(self, state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        error, service = state.outcome.exception(), self.service
        if isinstance(error, _Retryable) and error.after is not None:
            return min(error.after + random.uniform(0, service.first_wait), service.longest_wait)
        return random.uniform(0, min(service.first_wait * 2 ** (state.attempt_number - 1), service.longest_wait))


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


def _client(service: RemoteConfig, httpx: Any) -> httpx.AsyncClient:
    """Return the client of this event loop, so of this scoring process: samples share its open connections."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # reward.concurrent limits open connections. No compression: MOST_BYTES counts bytes as received.
        headers = {"content-type": "application/json", "accept-encoding": "identity", **_headers(service)}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        _clients[loop] = httpx.AsyncClient(headers=headers, timeout=service.timeout, limits=limits)
    return _clients[loop]


def _headers(service: RemoteConfig) -> dict[str, str]:
    """Read the headers' values from the environment. Messages never contain a value."""
    values = {}
    for name, variable in service.headers.items():
        value = os.environ.get(variable)
        if value is None:
            raise ValueError(f"reward.remote.headers: {name} reads {variable}, which is not set in this environment")
        if not value.isascii() or not value.isprintable() or value != value.strip() or not value:
            raise ValueError(
                f"reward.remote.headers: {name} reads {variable}, and its value is not valid in a header: it is empty, "
                "not ASCII, has white space around it or contains a line break"
            )
        values[name] = value
    return values


def _plain(value: Any) -> Any:
    """Convert NumPy values of rows for JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"the row holds {value!r} ({type(value).__name__}), which JSON cannot represent")


def _shown(answer: bytes) -> str:
    return repr(answer[: 4 * SHOWN].decode(errors="replace")[:SHOWN])
