"""The secret by which the launchers of one run know each other, and which never passes the network.

It is Ray's token. If RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is set on every node, that token is the secret. Otherwise the head
draws one and writes it to a file that only its user can read, in a folder that every node sees.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.ray import env
from megarl.commands.launch.topology import Topology


def secret_of_environment(environ: Mapping[str, str]) -> str | None:
    """Return the user's secret; "" if the user has disabled authentication, None if a new one is needed.

    Raises OSError if RAY_AUTH_TOKEN_PATH cannot be read.
    """
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token
    if path := environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path).read_text().strip()
    if environ.get("RAY_AUTH_MODE") == "token":
        return Path("~/.ray/auth_token").expanduser().read_text().strip()
    return "" if environ.get("RAY_AUTH_MODE") else None


class JoinFile:
    """The file with Ray's variables for the members of one run, named after the head's address."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self.path = folder.absolute() / f".megarl-join-{topology.master}-{topology.port}.json"
        self._partial = self.path.with_suffix(".partial")
        self._is_writer = False

    def write(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Draw a token, write Ray's variables and return them. Raises OSError if the folder cannot be written to."""
        variables = env.authentication(environ)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_writer = True
        self._partial.unlink(missing_ok=True)
        with open(os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(variables, file)
        self._partial.replace(self.path)  # of an earlier run that was killed
        return variables

    def read(self) -> dict[str, str] | None:
        """Return the variables; None if the file is not there yet."""
        try:
            variables: dict[str, str] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        return variables

    def delete(self) -> None:
        """Delete the file, if this object has written it."""
        if self._is_writer:
            self._partial.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)


def proof(secret: str, challenge: str, hello: Mapping[str, object]) -> str:
    """Return what shows that the sender of `hello` knows the secret. `challenge`: a number that the head has just drawn."""
    text = json.dumps([challenge, hello.get("node_rank"), hello.get("nodes"), hello.get("host")])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
