"""Connection to a session's key-value store: JSON values, and waits that an abort ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megarl.weight_sync.session import ABORT, Session, WeightSyncError

_ABORT_POLL_SECONDS = 0.2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005
# Longest pause while engines load or check weights: hundreds of ranks then wait at one store, for seconds.
LOAD_PAUSE = 0.05


class StoreChannel:
    """One process's connection to the store. Use it from one thread at a time.

    Waits poll for their keys and, less often, for an abort. The store's blocking wait takes keys that must all appear, not
    the first of several, and prints warnings on time-outs.
    """

    def __init__(self, session: Session, store: Any = None) -> None:
        self.session = session
        self.store = session.open_store() if store is None else store
        self.lost: str | None = None  # set once the store is gone: the reason

    def publish(self, key: str, value: Any) -> None:
        self.publish_bytes(key, json.dumps(value).encode())

    def publish_bytes(self, key: str, value: bytes) -> None:
        self._call(self.store.set, self.session.key(key), self.session.sign(key, value))

    def read_bytes(self, key: str) -> bytes:
        """Return the value of a key that exists. Raises WeightSyncError if no process of the session wrote it."""
        return self._verified(key, self._call(self.store.get, self.session.key(key)))

    def _verified(self, key: str, signed: bytes) -> bytes:
        value = self.session.verified(key, bytes(signed))
        if value is None:
            raise WeightSyncError(
                f"the value of {key!r} in the store at {self.session.host}:{self.session.port} is not from a process of "
                "this run: another process of the network writes to the store"
            )
        return value

    def has(self, key: str) -> bool:
        return bool(self._call(self.store.check, [self.session.key(key)]))

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that exist, in one request."""
        values = self._call(self.store.multi_get, [self.session.key(k) for k in keys])
        return [json.loads(self._verified(key, value)) for key, value in zip(keys, values, strict=True)]

    def next_number(self, counter: str) -> int:
        """Return 0, 1, 2, ...: each number once, across all processes."""
        return int(self._call(self.store.add, self.session.key(counter), 1)) - 1

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call(self.store.delete_key, self.session.key(key))

    def wait(self, keys: Sequence[str], awaited: str, *, longest_pause: float = _LONGEST_PAUSE) -> list[Any]:
        """Wait until all `keys` exist and return their values. `awaited` describes them in error messages.

        longest_pause: seconds between two requests to the store, at most.
        """
        missing = list(keys)

        def arrived() -> bool:
            while missing and self._call(self.store.check, [self.session.key(missing[0])]):
                missing.pop(0)
            return not missing

        self.wait_until(arrived, lambda: f"{awaited} ({', '.join(missing)})", longest_pause)
        return self.read(keys)

    def wait_until(
        self, done: Callable[[], bool], awaited: Callable[[], str], longest_pause: float = _LONGEST_PAUSE
    ) -> None:
        """Poll `done` until it is true. Raises WeightSyncError if the session is aborted or its timeout passes."""
        try:
            in_time = self._poll(done, longest_pause)
        except WeightSyncError as error:
            raise WeightSyncError(f"{error} (this process waited for {awaited()})") from error
        if not in_time:
            raise WeightSyncError(
                f"waited {self.session.timeout:g} s for {awaited()}; a peer is dead or stuck "
                f"(if it is only slow, raise weight_sync.timeout)"
            )

    def _poll(self, done: Callable[[], bool], longest_pause: float) -> bool:
        """Return False if `done` is still false after the session's timeout."""
        start = time.monotonic()
        next_abort_poll, pause = start + _ABORT_POLL_SECONDS, _FIRST_PAUSE
        while not done():
            now = time.monotonic()
            if now >= next_abort_poll:
                self.raise_if_aborted()
                next_abort_poll = now + _ABORT_POLL_SECONDS
            if now - start > self.session.timeout:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, longest_pause)
        return True

    def abort_reason(self) -> str | None:
        """Return the reason for which a process of the session has aborted it; None if it goes on."""
        key = self.session.key(ABORT)
        if not self._call(self.store.check, [key]):
            return None
        reason = self.session.verified(ABORT, bytes(self._call(self.store.get, key)))
        return None if reason is None else reason.decode()

    def raise_if_aborted(self) -> None:
        """Raise WeightSyncError if a process of the session has aborted it."""
        reason = self.abort_reason()
        if reason is not None:
            raise WeightSyncError(f"weight sync was aborted: {reason}")

    def abort(self, reason: str) -> None:
        """Abort the session over this connection. See `Session.abort`."""
        self._call(self.session.set_abort, self.store, reason)

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except dist.DistError as error:
            why = self.lost or "its process is gone or the network between is down"
            raise WeightSyncError(
                f"the connection to the weight sender at {self.session.host}:{self.session.port} (trainer 0) broke "
                f"({type(error).__name__}: {error}): {why}"
            ) from error
