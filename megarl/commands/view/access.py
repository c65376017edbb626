"""Access to the page: the Host header, the token, and the headers that keep a sample's text from acting as a page."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_ALWAYS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN = "This page needs the token of `megarl view`: open the URL that the command has printed, or append ?token=... to the address.\n"


class Access:
    """Passes requests that name an allowed host and have the token; answers the others with an error.

    A request with ``?token=`` receives a cookie and is redirected to the same address without the token. Other requests have
    the cookie, or the header ``Authorization: Bearer TOKEN``. Host names are checked because a page of another site can
    let its own name point to this server (DNS rebinding); the port is not, so that SSH can forward another one.
    """

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"megarl_view_{port}"  # cookies of a host are shared by its ports
        self._names = allowed_names(host)
        self._any_address = not _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan messages of the server
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_ALWAYS)
            await send(message)

        await self._answer(scope)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        if not self._allows_host(headers.get("host", "")):
            return PlainTextResponse(
                "This host name is not allowed. Use localhost or 127.0.0.1, or start `megarl view` with --host NAME.\n",
                400,
            )
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens:
            if not self._is_token(tokens[0]):
                return PlainTextResponse("Wrong token. " + _NO_TOKEN, 403)
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # A path that begins with two slashes would name another host.
            path = "/" + scope["path"].lstrip("/")
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            answer.set_cookie(self._cookie, tokens[0], httponly=True, samesite="lax", path="/")
            return answer
        if self._is_token(_bearer(headers)) or self._is_token(self._from_cookie(scope)):
            return self._app
        return PlainTextResponse(_NO_TOKEN, 403)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)

    def _from_cookie(self, scope: Scope) -> str:
        # Not SimpleCookie: it drops all cookies if one is malformed, and other servers of this host set cookies, too.
        return HTTPConnection(scope).cookies.get(self._cookie, "")

    def _allows_host(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        return name in self._names or (self._any_address and _is_address(name))


def allowed_names(host: str) -> set[str]:
    """Return the host names of requests that are allowed if the server listens on `host`."""
    names = {*_LOOPBACK_NAMES, host.lower()}
    if not _is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return names - {"0.0.0.0", "::"}


def _bearer(headers: Headers) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""


def _is_loopback(host: str) -> bool:
    return host in _LOOPBACK_NAMES or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
