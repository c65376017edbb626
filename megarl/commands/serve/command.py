"""Entry point of `megarl serve`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

from megarl.cluster import is_controller, serve
from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.calls import TrainerCalls, end_text
from megarl.commands.serve.session import TrainingSession
from megarl.commands.view.command import listen
from megarl.errors import InputError
from megarl.recipe import Recipe

PORT = 8451
_KEY, _PREFIX, _SHORTEST = "TINKER_API_KEY", "tml-", 20
_LAST_SECONDS, _END_SECONDS = 3, 10.0  # for answers to clients that wait, and until the thread is left


def serve_recipe(recipe: Recipe, *, host: str, port: int | None, name: str | None) -> None:
    """Serve the recipe's model until Ctrl-C. Raises RecipeError or InputError before a process starts.

    Under torchrun, rank 0 alone listens; the others serve its calls.
    """
    if not is_controller(recipe.cluster):
        serve(recipe)
        return
    token = api_key()
    listener = listen(host, PORT if port is None else port)
    served = name or recipe.model.path
    is_serving = False
    try:
        with listener, TrainingSession.open(recipe, resettable=True) as session:
            calls = TrainerCalls()
            api = TrainingApi(session, served, calls)
            with _answering(api, token, listener):
                print(start_text(served, host, listener.getsockname()[1], token), flush=True)
                is_serving = True
                calls.serve(session.cluster.check)
    except KeyboardInterrupt:
        if not is_serving:
            raise
        print("The server has ended.", flush=True)


def api_key() -> str:
    """Return the key of the environment, or a new one. Raises InputError for a key that clients refuse or that is short."""
    key = os.environ.get(_KEY)
    if key is None:
        return _PREFIX + secrets.token_urlsafe(24)
    if not key.startswith(_PREFIX) or len(key) < _SHORTEST:
        raise InputError(
            f"{_KEY} in this shell cannot be a server's key: it must start with {_PREFIX} and have at least {_SHORTEST} characters. "
            f"Unset it to get a new key."
        )
    return key


def start_text(name: str, host: str, port: int, token: str) -> str:
    """Return the lines that the command prints: what clients set."""
    address = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = f"[{address}]" if ":" in address else address
    lines = [
        f"{name} is ready. For clients:",
        f"  export TINKER_BASE_URL=http://{address}:{port}",
        f"  export {_KEY}={token}",
    ]
    if host not in ("127.0.0.1", "localhost", "::1"):
        lines.append("Everyone with this key can train and read the model. Traffic is not encrypted.")
    else:
        lines.append(f"From another machine: ssh -L {port}:localhost:{port} {socket.gethostname()}")
    return "\n".join([*lines, "Ctrl-C ends the server; states stay in the run's directory."])


@contextlib.contextmanager
def _answering(api: TrainingApi, token: str, listener: socket.socket) -> Iterator[None]:
    """Answer requests in a thread. The main thread makes the trainers' calls."""
    import uvicorn

    from megarl.commands.serve.server import make_app

    config = uvicorn.Config(
        make_app(api, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    server = uvicorn.Server(config)
    problems: list[Any] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 -- raised below
            problems.append(error)
        finally:
            api.calls.stop.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        api.end(end_text(error))
        raise
    finally:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients may be sending requests
        server.should_exit = True
        thread.join(_END_SECONDS)
    if problems:
        raise problems[0]
