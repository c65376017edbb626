"""Client sessions, the model in training and samplers of the training API."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

ALIVE_SECONDS = 60.0  # after its last message until a session counts as ended; clients send one every 10 s


class UnknownId(LookupError):
    """An id that this server has not given out, or not since its start."""


@dataclass
class ClientSession:
    """A client's session. `seen`: time of its last message, in seconds of `time.monotonic`."""

    seen: float
    finished: bool = False


class ClientSessions:
    """Sessions by id. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[str, ClientSession] = {}

    def create(self) -> str:
        """Return the id of a new session."""
        session = f"s-{secrets.token_hex(8)}"
        self._sessions[session] = ClientSession(time.monotonic())
        return session

    def touch(self, session: str) -> ClientSession:
        """Note a sign of life. Raises UnknownId."""
        if session not in self._sessions:
            raise UnknownId(f"session {session!r} is unknown; sessions end with the server: create a new ServiceClient")
        self._sessions[session].seen = time.monotonic()
        return self._sessions[session]

    def has_ended(self, session: str) -> bool:
        """Return whether a session has been finished, or its client has been silent for `ALIVE_SECONDS`."""
        held = self._sessions[session]
        return held.finished or time.monotonic() - held.seen >= ALIVE_SECONDS


@dataclass
class TrainedModel:
    """The model in training. `calls`: operation by the client's number of the call, from 1 on without a gap; 0 gives it its first
    weights. `last`: the largest number. `refused`: larger numbers, of refused calls that were no passes. `broken`: why the gradient of
    a pass since the last update is missing. `failed_start`: the error of the call that should have given it its first weights."""

    id: str
    session: str
    calls: dict[int, str] = field(default_factory=dict)
    last: int = 0
    refused: set[int] = field(default_factory=set)
    broken: str | None = None
    failed_start: str | None = None

    @property
    def folder(self) -> str:
        """Its name in paths of files."""
        return self.id.replace(":", "-")

    def note(self, number: int, operation: str) -> None:
        """Note a call that was accepted."""
        self.calls[number], self.last = operation, max(self.last, number)
        self.refused = {each for each in self.refused if each > self.last}

    def missing_before(self, number: int) -> str:
        """Return which calls before this one did not arrive; "" if all did."""
        first, last = self.last + 1, number - 1
        if last - first + 1 <= sum(each < number for each in self.refused):
            return ""
        return (
            f"call {first} of {self.id} did not arrive"
            if first == last
            else f"calls {first} to {last} of {self.id} did not all arrive"
        )


@dataclass(frozen=True)
class ServedSampler:
    """A sampling session of the client's `session`. `version`: of the weights. `path`: of named weights."""

    id: str
    session: str
    version: int
    path: str | None = None
