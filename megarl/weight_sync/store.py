"""One side's line to the session's key-value store: JSON values, and waits that can be ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megarl.weight_sync.session import SessionBase, WeightSyncError

_ABORT_POLL_SECONDS = 0.2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class StoreChannel:
    """Used by one thread at a time.

    Waiting polls, for a key and now and then for an abort: the store can block on keys that must
    all appear, not on the first of several, and its own time-outs print warnings.
    """

    def __init__(self, session: SessionBase, store: Any = None) -> None:
        self.session = session
        self.store = session.open_store() if store is None else store
        self.lost: str | None = None  # why there is no store to talk to any more, once that is known

    def publish(self, key: str, value: Any) -> None:
        self._call(self.store.set, self.session.key(key), json.dumps(value))

    def publish_bytes(self, key: str, value: bytes) -> None:
        self._call(self.store.set, self.session.key(key), value)

    def bytes_of(self, key: str) -> bytes:
        """Of a key that is there already."""
        return bytes(self._call(self.store.get, self.session.key(key)))

    def has(self, key: str) -> bool:
        return bool(self._call(self.store.check, [self.session.key(key)]))

    def latest(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys that are there already, in one request."""
        return [json.loads(value) for value in self._call(self.store.multi_get, [self.session.key(k) for k in keys])]

    def next_number(self, counter: str) -> int:
        """0, 1, 2, ...: each once, whoever asks."""
        return int(self._call(self.store.add, self.session.key(counter), 1)) - 1

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call(self.store.delete_key, self.session.key(key))

    def wait(self, keys: Sequence[str], awaited: str) -> list[Any]:
        """The values of all `keys`, once each is there. `awaited` says in errors what they stand for."""
        missing = list(keys)

        def arrived() -> bool:
            while missing and self._call(self.store.check, [self.session.key(missing[0])]):
                missing.pop(0)
            return not missing

        self.wait_until(arrived, lambda: f"{awaited} ({', '.join(missing)})")
        return self.latest(keys)

    def wait_until(self, done: Callable[[], bool], awaited: Callable[[], str]) -> None:
        """Poll `done`. Raises WeightSyncError on an abort of the session or after its time-out."""
        try:
            in_time = self._poll(done)
        except WeightSyncError as error:
            raise WeightSyncError(f"{error} (this process waited for {awaited()})") from error
        if not in_time:
            raise WeightSyncError(
                f"waited {self.session.timeout:g} s for {awaited()}; a peer is dead or stuck "
                f"(if it is only slow, raise exchange.timeout)"
            )

    def _poll(self, done: Callable[[], bool]) -> bool:
        """False where it is not `done` within the session's time-out."""
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
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return True

    def raise_if_aborted(self) -> None:
        key = self.session.key("abort")
        if self._call(self.store.check, [key]):
            raise WeightSyncError(f"the weight exchange was aborted: {self._call(self.store.get, key).decode()}")

    def abort(self, reason: str) -> None:
        """As `FullSession.abort`, over this connection."""
        self._call(self.store.compare_set, self.session.key("abort"), "", reason)

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except dist.DistError as error:
            why = self.lost or "its process is gone or the network between is down"
            raise WeightSyncError(
                f"the connection to the weight sender at {self.session.host}:{self.session.port} (trainer 0) broke "
                f"({type(error).__name__}: {error}): {why}"
            ) from error
