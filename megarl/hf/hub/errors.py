"""Errors of huggingface_hub as one message each that says what to do."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megarl.hf.hub.names import HubError, HubName, Kind


def without_secrets(text: str) -> str:
    """Return `text` without user, password and query of the addresses in it."""
    return re.sub(r"(\w+://)(?:[^/\s'\"]*@)?([^?\s'\"]*)(?:\?[^\s'\")]*)?", r"\1\2", text)


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def endpoint() -> str:
    """Return the address of the hub, for messages: without user, password and query."""
    from huggingface_hub import constants

    return without_secrets(constants.ENDPOINT)


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@cache
def _errors() -> Any:
    import huggingface_hub.errors

    return huggingface_hub.errors


def http_status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def is_refused(error: BaseException) -> bool:
    """Return whether `error` is an answer of the hub that gives no files: deleted, private, gated or overloaded."""
    return isinstance(error, _errors().HfHubHTTPError) and http_status(error) is not None


def is_unreachable(error: BaseException) -> bool:
    """Return whether `error` means that the hub gave no answer, or an answer of an overloaded server."""
    if isinstance(error, _errors().HfHubHTTPError):
        status = http_status(error)
        return status is not None and (status >= 500 or status == 429)
    package = type(error).__module__.split(".")[0]  # HTTP libraries differ between versions of huggingface_hub
    return package in ("httpx", "httpx2", "requests") or isinstance(error, (ConnectionError, TimeoutError))


@contextlib.contextmanager
def hub_errors(name: HubName, kind: Kind, file: str = "") -> Iterator[None]:
    """Convert errors of huggingface_hub to HubErrors that say what to do. file: the only file of the repository that is needed."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        converted = _hub_error(error, name, kind, file)
        if converted is None:
            raise
        raise converted from error


def _hub_error(error: Exception, name: HubName, kind: Kind, file: str) -> HubError | None:
    errors, kind_name = _errors(), "model" if kind == "model" else "data set"
    page = f"{endpoint()}/{'' if kind == 'model' else 'datasets/'}{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"the {kind_name} {name.repo} is gated, and this account has no access",
            f"accept its terms at {page}, then log in on every node with `hf auth login`, or set HF_TOKEN",
            is_definite=True,
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{_no_folder()}, and {endpoint()} has no such {kind_name}, or it is private{_status(error)}"
            if kind == "model"
            else f"{endpoint()} has no data set {name.repo}, or it is private{_status(error)}",
            "correct the name; for a private one log in on every node with `hf auth login`, or set HF_TOKEN",
            is_definite=True,
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{name.repo} has no revision {name.revision!r}",
            f"name a branch, a tag or a commit of {page}/tree/main",
            is_definite=True,
        )
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{name.repo!r} is not a name on the hub: {error}", "write OWNER/NAME, or the path of a folder")
    if isinstance(error, errors.LocalEntryNotFoundError) or is_unreachable(error):
        return not_in_cache(error, name, kind_name, file)
    if isinstance(error, errors.HfHubHTTPError):
        return HubError(
            f"{endpoint()} refused {name.repo}{_status(error)}: {without_secrets(' '.join(str(error).split()))}",
            f"open {page} in a browser",
        )
    if type(error).__module__.split(".")[0] == "hf_xet":
        return HubError(
            f"the download of {name.repo} failed: {without_secrets(' '.join(str(error).split()))}",
            "start again: it goes on where it stopped; HF_HUB_DISABLE_XET=1 downloads over plain HTTP",
        )
    if isinstance(error, OSError):
        return _disk_error(error, name)
    return None


def _no_folder() -> str:
    return f"there is no folder of this name (working directory: {Path.cwd()})"


def _status(error: BaseException | None) -> str:
    status = http_status(error)
    return "" if status is None else f" (HTTP status {status})"


def download_command(name: HubName, kind: Kind, file: str = "") -> str:
    """Return the command that downloads a repository, or one file of it, into the cache."""
    revision = f" --revision {name.revision}" if name.revision else ""
    return f"hf download {'' if kind == 'model' else '--repo-type dataset '}{name.repo}{f' {file}' if file else ''}{revision}"


def not_in_cache(error: Exception | None, name: HubName, kind_name: str, file: str = "") -> HubError:
    """Return the error for files that are missing in the cache while the hub gives no answer. `error`: the cause, if known.

    file: the only file that is needed, if not all are.
    """
    revision = f"@{name.revision}" if name.revision else ""
    state = f"{file} of {name.repo}{revision} is not" if file else f"{name.repo}{revision} is not complete"
    state = f"{state} in the cache {cache_folder()}"
    folder = f"{_no_folder()}, " if kind_name == "model" else ""
    fetch = download_command(name, "model" if kind_name == "model" else "dataset", file)
    if is_offline():
        return HubError(
            f"{folder}HF_HUB_OFFLINE is set, and {state}",
            f"fetch it where there is a network (`{fetch}`) into this cache, set HF_HOME to the folder that has it, give the "
            "path of a folder, or unset HF_HUB_OFFLINE (https_proxy sets a proxy, HF_ENDPOINT a mirror)",
        )
    first = None if error is None else error.__cause__ or error
    cause = "" if first is None else _status(first) or f" ({type(first).__name__})"
    return HubError(
        f"{folder}{endpoint()} {'gives no files' if http_status(first) else 'does not answer'}{cause}, and {state}",
        f"set https_proxy, or HF_ENDPOINT to a mirror; or run `{fetch}` where there is a network and copy the cache; or give the "
        "path of a folder",
    )


def _disk_error(error: OSError, name: HubName) -> HubError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(
            f"the disk of the cache {cache_folder()} is full: {name.repo} is not complete",
            "free some space: the download then goes on where it stopped; or set HF_HOME to a folder on another disk, where it "
            "starts again",
        )
    return HubError(
        f"{name.repo} cannot be written to the cache {cache_folder()}: {error.strerror or error}",
        "set HF_HOME to a folder that can be written to",
    )
