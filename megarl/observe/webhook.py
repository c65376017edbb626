"""The webhook of `observe.alerts`: its URL, which is a secret, the bodies that chats accept, and one request."""

from __future__ import annotations

import contextlib
import html
import json
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from megarl.errors import NotHereError, RecipeError
from megarl.recipe.observe import AlertsConfig
from megarl.recipe.urls import check_url, is_this_machine

if TYPE_CHECKING:
    import httpx

TIMEOUT = 10.0  # seconds of a request
_KEY = "observe.alerts.url"
_MOST_BYTES, _SHOWN = 4096, 200  # of an answer: bytes that are read, characters in a message
_SHORTEST_SECRET = 6  # characters; shorter parts of a URL are words such as "api"
_CODES = {"feishu": ("code", "StatusCode"), "dingtalk": ("errcode",), "wecom": ("errcode",)}
"""Fields of an answer that are 0 after a success. These services report errors with HTTP status 200."""


class WebhookError(Exception):
    """The webhook did not accept a message. The text contains no part of its URL. `passing`: a later request may succeed."""

    def __init__(self, cause: str, *, passing: bool) -> None:
        super().__init__(cause)
        self.passing = passing


def webhook_url(alerts: AlertsConfig) -> str:
    """Return the URL in the environment variable that `alerts.url` names. No message contains it.

    Raises NotHereError if the variable is not set or empty, RecipeError if its value is not an HTTP URL.
    """
    assert alerts.url is not None
    url = os.environ.get(alerts.url, "").strip()
    if not url:
        remedy = f"export {alerts.url} with the webhook's URL, or set {_KEY}=null"
        raise NotHereError(_KEY, "this environment variable is not set here", remedy, value=alerts.url)
    try:
        check_url("observe.alerts", url)
        is_url = url.isascii() and url.isprintable() and " " not in url
    except RecipeError:
        is_url = False
    if not is_url:
        problem = "the value of this environment variable is not an http or https URL with a host, and without name and password"
        raise RecipeError(_KEY, problem, f"export {alerts.url} with e.g. https://host/path", value=alerts.url)
    return url


def unencrypted_notice(alerts: AlertsConfig) -> str | None:
    """Return a notice if alerts go to another machine without encryption; else None, also for a URL that cannot be used."""
    if alerts.url is None:
        return None
    try:
        url = urlsplit(webhook_url(alerts))
    except RecipeError:
        return None
    if url.scheme == "https" or is_this_machine(url):
        return None
    return f"the URL in {alerts.url} (observe.alerts.url) is plain http: alerts and the URL itself are sent unencrypted"


def body_of(form: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON body of a message. `form`: `observe.alerts.format`. `message`: has `text`, and for json other fields.

    The text may quote a sample, so it must not mention all members of a chat: `<` begins a mention.
    """
    text = message["text"]
    if form == "slack":
        return {"text": html.escape(text, quote=False)}  # Slack decodes these three entities, and no others
    if form == "feishu":
        return {"msg_type": "text", "content": {"text": text.replace("<", "‹")}}
    if form in ("dingtalk", "wecom"):
        return {"msgtype": "text", "text": {"content": text.replace("<", "‹")}}
    return message


class Webhook:
    """Sends messages to a URL, in one thread. Use it as a context manager in this thread."""

    def __init__(self, url: str, form: str) -> None:
        """form: `observe.alerts.format`."""
        self._url, self._form = url, form
        self._parts = contextlib.ExitStack()
        self._client: httpx.Client | None = None

    def __enter__(self) -> Webhook:
        thread, logger = threading.get_ident(), logging.getLogger("httpx")

        def is_of_others(record: logging.LogRecord) -> bool:
            return record.thread != thread

        logger.addFilter(is_of_others)  # httpx logs the URL of each request
        self._parts.callback(logger.removeFilter, is_of_others)
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def post(self, message: dict[str, Any]) -> None:
        """Send a message. Redirects are not followed, since they could lead to another host. Raises WebhookError."""
        import httpx

        try:
            body = json.dumps(body_of(self._form, message), allow_nan=False).encode()
            status, answer = self._request(body)
        except httpx.TransportError as error:
            raise self._error(f"no connection: {type(error).__name__}: {error}", passing=True) from None
        except Exception as error:  # noqa: BLE001 -- a run never ends because of its alerts
            raise self._error(f"{type(error).__name__}: {error}", passing=False) from None
        if 300 <= status < 400:
            raise self._error(f"it answered {status}, and redirects are not followed", passing=False)
        if not 200 <= status < 300:
            raise self._error(f"it answered {status}: {answer[:_SHOWN]!r}", passing=status == 429 or status >= 500)
        if _reports_error(self._form, answer):
            raise self._error(f"it answered {answer[:_SHOWN]!r}", passing=False)

    def _request(self, body: bytes) -> tuple[int, str]:
        """Return status and text of the answer; at most `_MOST_BYTES` of it are read, for about `TIMEOUT` seconds."""
        import httpx

        if self._client is None:
            headers = {"content-type": "application/json; charset=utf-8", "accept-encoding": "identity"}
            client = httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=False)
            self._client = self._parts.enter_context(client)
        deadline = time.monotonic() + TIMEOUT
        with self._client.stream("POST", self._url, content=body) as response:
            answer = bytearray()
            for part in response.iter_raw():
                answer += part
                if len(answer) >= _MOST_BYTES or time.monotonic() > deadline:
                    break
            return response.status_code, answer.decode(errors="replace")

    def _error(self, cause: str, *, passing: bool) -> WebhookError:
        return WebhookError(without_secrets(cause, self._url), passing=passing)


def without_secrets(text: str, url: str) -> str:
    """Return `text` with `***` for each part of `url` after its host, which a service may repeat in an answer."""
    parts = urlsplit(url)
    words = re.split(r"[/?&=;,#]", f"{parts.path}?{parts.query}#{parts.fragment}")
    secrets = {form for word in words for form in (word, unquote(word), quote(unquote(word), safe=""))}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _reports_error(form: str, answer: str) -> bool:
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return form in _CODES  # these services answer with an object
    return any(fields.get(code, 0) != 0 for code in _CODES.get(form, ()))
