"""Entry point of `megarl view`."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from urllib.parse import quote

from megarl.errors import InputError, as_input_error
from megarl.observe.page.viewed_run import ViewedRun, labels
from megarl.observe.run_dir import RunDirectory

PORT = 8421
PORTS_TRIED = 20  # from `PORT` on, if no port is given


def view(paths: list[Path], *, follow: bool, host: str, port: int | None) -> None:
    """Serve the page about the runs in `paths` until Ctrl-C. Raises InputError before the server starts."""
    import uvicorn

    from megarl.commands.view.server import make_app

    with as_input_error():
        for path in paths:
            RunDirectory(path).require("view")
    different = list({path.resolve(): path for path in paths}.values())
    runs = [
        ViewedRun(number, path, label)
        for number, (path, label) in enumerate(zip(different, labels(different), strict=True))
    ]
    listener = listen(host, port)
    number = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = make_app(runs, follow=follow, token=token, host=host, port=number)
    # The access log would contain the token.
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
    print(start_text(runs, host, number, token), flush=True)
    server.run(sockets=[listener])


def start_text(runs: list[ViewedRun], host: str, port: int, token: str) -> str:
    """Return the lines that the command prints: the page's address, and how to reach it from another machine."""
    names = ", ".join(run.label for run in runs)
    is_open = host not in ("127.0.0.1", "localhost", "::1")
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    lines = [f"{names}: http://{f'[{name}]' if ':' in name else name}:{port}/?token={quote(token)}"]
    if is_open:
        lines.append("Everyone with this address can read the runs. Traffic is not encrypted.")
    else:
        lines.append(
            f"From another machine: ssh -L {port}:localhost:{port} {socket.gethostname()}, then open this address there."
        )
    lines.append("Ctrl-C ends the page; it does not affect the runs.")
    return "\n".join(lines)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on `host`: on `port` (0: any free port), by default on the first free one from `PORT` on."""
    tried = [port] if port is not None else [*range(PORT, PORT + PORTS_TRIED), 0]
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InputError(
            f"--host {host}: {error.strerror}. Give an address of this machine, as in --host 0.0.0.0."
        ) from error
    for number in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], number))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if number == tried[-1]:
                raise InputError(
                    f"cannot listen on {host}, port {number}: {error.strerror}. Choose another --port, or an address of "
                    "this machine for --host."
                ) from error
    raise AssertionError("the last port returns or raises")
