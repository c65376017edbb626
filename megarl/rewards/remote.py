"""A reward service over HTTP: it is posted a sample as JSON and answers as a scorer returns."""

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
from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.settings import ScorerSettings

if TYPE_CHECKING:
    import httpx
    import tenacity

MOST_BYTES = 1 << 20  # of an answer
SHOWN = 300  # characters of an answer in an error
TOO_MANY = 429


class ServiceError(RuntimeError):
    """The service did not score a sample, and asking again would not help."""


class _Again(Exception):
    """Worth another request, after so many seconds where the service said so."""

    def __init__(self, cause: str, after: float | None = None) -> None:
        super().__init__(cause)
        self.after = after


def prepare(settings: ScorerSettings) -> None:
    """Import what is needed, and see that the headers' values are there. Raises ValueError where one is not."""
    import httpx
    import tenacity

    assert httpx and tenacity
    _headers(settings.remote)


@scorer("remote", prepare=prepare, settings=True, needs_ground_truth=False)
async def remote(request: ScoreRequest, settings: ScorerSettings) -> Any:
    """What the service at reward.remote.url says of a sample.

    Raises ServiceError where it says nothing: after all attempts, at a 4xx other than 429, at an answer that is no JSON.
    """
    import httpx
    import tenacity

    service, body = settings.remote, _body(request)
    requests = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(service.attempts),
        wait=_Wait(service),
        retry=tenacity.retry_if_exception_type(_Again),
        reraise=True,
    )
    client = _client(service, httpx)
    try:
        return await requests(_ask, client, service, body)
    except _Again as error:
        times = f" ({service.attempts} requests)" if service.attempts > 1 else ""
        raise ServiceError(f"{error}{times}") from error


async def _ask(client: httpx.AsyncClient, service: RemoteConfig, body: bytes) -> Any:
    import httpx

    assert service.url is not None, "the recipe is refused otherwise"
    try:
        status, headers, answer = await asyncio.wait_for(_post(client, service.url, body), service.timeout)
    except (asyncio.TimeoutError, httpx.TimeoutException) as error:
        raise _Again(f"no answer within {service.timeout:g} s") from error
    except httpx.TransportError as error:
        raise _Again(f"no connection: {type(error).__name__}: {error}") from error
    if status == TOO_MANY or status >= 500:
        raise _again(status, headers.get("retry-after"), answer, service)
    if 300 <= status < 400:
        place = headers.get("location", "nowhere")[:SHOWN]
        raise ServiceError(
            f"it answered {status}, see {place}: give reward.remote.url as it is, no redirect is followed"
        )
    if status != httpx.codes.OK:
        raise ServiceError(f"it answered {status}: {_shown(answer)}")
    if len(answer) > MOST_BYTES:
        raise ServiceError(f"its answer has more than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"its answer is no JSON ({error}): {_shown(answer)}") from error


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[int, httpx.Headers, bytes]:
    """Status, headers, and as much of the answer as is read of any: a byte past the limit."""
    async with client.stream("POST", url, content=body) as response:
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > MOST_BYTES:
                break
        return response.status_code, response.headers, bytes(answer[: MOST_BYTES + 1])


def _again(status: int, retry_after: str | None, answer: bytes, service: RemoteConfig) -> Exception:
    cause = f"it answered {status}: {_shown(answer)}"
    after = _seconds(retry_after) if status in (TOO_MANY, 503) else None
    if after is not None and after > service.longest_wait:
        limit = f"reward.remote.longest_wait is {service.longest_wait:g}"
        return ServiceError(f"{cause}; it asks for {after:.0f} s of waiting, and {limit}")
    return _Again(cause, after)


def _seconds(retry_after: str | None) -> float | None:
    """Of the header Retry-After (RFC 9110, 10.2.3), a number or a date; None where it is neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


class _Wait:
    """Seconds before the next request: what the service asked for, and a little more, so that not all come back at once;
    else at random, up to twice as many each time."""

    def __init__(self, service: RemoteConfig) -> None:
        self.service = service

    def __call__(self, state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        error, service = state.outcome.exception(), self.service
        if isinstance(error, _Again) and error.after is not None:
            return min(error.after + random.uniform(0, service.first_wait), service.longest_wait)
        return random.uniform(0, min(service.first_wait * 2 ** (state.attempt_number - 1), service.longest_wait))


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


def _client(service: RemoteConfig, httpx: Any) -> httpx.AsyncClient:
    """One for each event loop, so for each process that scores: its connections stay open from sample to sample."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # How many are open is limited by reward.concurrent. Answers are counted as they come, not as they unpack.
        headers = {"content-type": "application/json", "accept-encoding": "identity", **_headers(service)}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        _clients[loop] = httpx.AsyncClient(headers=headers, timeout=service.timeout, limits=limits)
    return _clients[loop]


def _headers(service: RemoteConfig) -> dict[str, str]:
    """Their values, from the environment. No message has one."""
    values = {}
    for name, variable in service.headers.items():
        value = os.environ.get(variable)
        if value is None:
            raise ValueError(f"reward.remote.headers: {name} is to be {variable}, which is not set in this environment")
        if not value.isascii() or not value.isprintable() or value != value.strip() or not value:
            raise ValueError(
                f"reward.remote.headers: {name} is to be {variable}, whose value is no header's: empty, not ASCII, or with "
                "white space around it or a line's end in it"
            )
        values[name] = value
    return values


def _body(request: ScoreRequest) -> bytes:
    return json.dumps(dataclasses.asdict(request), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    """What rows hold beside JSON's own kinds: numpy's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"the row holds {value!r} ({type(value).__name__}), which JSON cannot")


def _shown(answer: bytes) -> str:
    return repr(answer[: 4 * SHOWN].decode(errors="replace")[:SHOWN])
