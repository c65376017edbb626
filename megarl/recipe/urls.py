"""URLs and headers of services. Secrets come from environment variables."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from megarl.errors import RecipeError

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"token$|secret|passw|passphrase|pwd|auth|credential|bearer|(api|access|private|ssh)[_-]?key", re.IGNORECASE
)


def names_secret(name: str) -> bool:
    """Return whether a setting or an argument with this name usually has a secret as its value, as `hf_token`."""
    return _SECRET.search(name) is not None


def check_url(section: str, text: str) -> None:
    """Raise RecipeError for a setting `section`.url that is not an HTTP URL, or that contains a secret."""

    def refusal(problem: str, remedy: str) -> RecipeError:
        return RecipeError(f"{section}.url", problem, remedy)

    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise refusal(f"this is not a URL: {error}", "give e.g. https://judge.example.com/score") from error
    if url.username is not None or url.password is not None:  # the message does not repeat it
        raise refusal("it contains a name or a password", f"put them into {section}.headers, as Authorization")
    if url.scheme not in ("http", "https") or not host:
        raise RecipeError(
            f"{section}.url",
            "a service needs an http or https URL with a host",
            "give e.g. https://host/path",
            value=text,
        )


def is_this_machine(url: SplitResult) -> bool:
    """Return whether the host of `url` is a loopback address or name."""
    host = url.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_variable(name: str) -> bool:
    """Return whether `name` can be the name of an environment variable."""
    return _VARIABLE.fullmatch(name) is not None


def check_headers(section: str, headers: Mapping[str, str]) -> None:
    """Raise RecipeError for headers that cannot be set, and for values that are not names of environment variables."""
    for name, variable in headers.items():
        if not _HEADER.fullmatch(name) or name.lower() in ("content-length", "content-type", "host"):
            problem = "this header cannot be set"
            raise RecipeError(f"{section}.headers", problem, "name e.g. Authorization", value=name)
        if not is_variable(variable):  # perhaps the secret itself, which is not shown
            problem = f"{name} must name an environment variable, and its value is not a valid name"
            raise RecipeError(f"{section}.headers", problem, f"write e.g. {{{name}: MY_TOKEN}}, and export MY_TOKEN")
