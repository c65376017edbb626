"""SIGTERM as a request to save and end: the run stops at the next moment at which its state is complete."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from megarl.exit_status import Terminated
from megarl.recipe.schema import TrainConfig

_CAUSE_SECONDS = 0.5  # time for a death to be noticed


class StopRequested(Terminated):
    """The run received SIGTERM, and its state can be saved now."""


class GracefulStop:
    """Turns the first SIGTERM into a request, which `check` raises. `grace_seconds`: `train.grace_seconds`; 0: no request.

    A second SIGTERM ends the run at once, as the end of the grace time does. The run then still completes a checkpoint that it
    is writing (`Checkpoints.rescue`), unless one more SIGTERM arrives.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self._requested_at: float | None = None
        self._timer: threading.Timer | None = None

    @classmethod
    def of(cls, train: TrainConfig) -> GracefulStop:
        """A replay repeats the recorded run's checkpoints, and saves no other."""
        return cls(0.0 if train.replay is not None else train.grace_seconds)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM in the block. Without a handler for SIGTERM (a run inside another program), do nothing.

        A handler that other code sets in the block stays: torchrun's cluster ignores SIGTERM after a failure.
        """
        former = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        if not (main and self.grace_seconds > 0 and callable(former)):
            yield
            return

        def request(number: int, frame: Any) -> None:
            signal.signal(signal.SIGTERM, former)
            self.request()
            limit = f"{self.grace_seconds:g} s at the latest (train.grace_seconds)"
            text = f"SIGTERM: the run ends at the next moment at which it can save a checkpoint, after {limit}. A second SIGTERM "
            text += "ends it at once. A checkpoint that is being written by then is completed first.\n"
            os.write(2, text.encode())  # a handler must not use the console's locks

        signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is request:
                signal.signal(signal.SIGTERM, former)
            if self._timer is not None:
                self._timer.cancel()

    def request(self) -> None:
        """Request the end of the run, and end it at once after the grace time."""
        self._requested_at = time.monotonic()
        self._timer = threading.Timer(self.grace_seconds, os.kill, (os.getpid(), signal.SIGTERM))
        self._timer.daemon = True
        self._timer.start()

    def withdraw(self) -> bool:
        """Drop a request and its time limit; return whether there was one. A further SIGTERM ends the run at once."""
        if self._requested_at is None:
            return False
        self._requested_at = None
        if self._timer is not None:
            self._timer.cancel()
        return True

    @property
    def seconds_left(self) -> float:
        """Seconds until the end of the grace time; all of them before a request."""
        since = 0.0 if self._requested_at is None else time.monotonic() - self._requested_at
        return max(0.0, self.grace_seconds - since)

    def check(self) -> None:
        """Raise StopRequested after SIGTERM. Call it only where the trainers are idle."""
        if self._requested_at is not None:
            raise StopRequested

    def after(self, check: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `check` of the run's processes, then the check of this object.

        A dead process has precedence: torchrun sends SIGTERM when it notices a death, which `check` may notice later.
        """

        def both() -> None:
            check()
            if self._requested_at is not None:
                time.sleep(_CAUSE_SECONDS)
                check()
            self.check()

        return both
