"""Alerts: messages about events of a run to a webhook (`observe.alerts`). The run never waits for them, except shortly at its end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any

from megarl.errors import pluralize
from megarl.observe.sessions import first_line
from megarl.observe.webhook import Webhook, WebhookError, webhook_url
from megarl.recipe.observe import AlertsConfig, Event

MOST_WAITING = 100  # messages; an older one is dropped for a newer one, so that the end of the run is sent
ATTEMPTS, FIRST_WAIT, WAIT_FACTOR = 4, 1.0, 4.0  # of a message; seconds before the second attempt; then times this
LAST_SECONDS = 5.0  # longest wait for unsent messages at the end of the run
_BETWEEN = 3.0  # seconds between two messages: DingTalk and WeCom accept 20 per minute
_LONGEST_CAUSE = 500  # characters; WeCom accepts 2,048 bytes
_HEADS: dict[Event, str] = {
    "start": "started",
    "death": "a process failed, the run goes on",
    "given_up": "an engine does not restart",
    "restart": "starts again",
    "engines": "engines",
    "rollback": "goes back to a checkpoint",
    "outage": "outage",
    "update": "unusual update",
    "warning": "warning",
    "failure": "failed",
    "end": "ended",
}


class Alerts:
    """Sends the events that a recipe selects, in their order, in a separate thread.

    A message that fails is repeated, then dropped. The first such failure is a warning, and `close` counts the others.
    """

    def __init__(self, config: AlertsConfig, run: str, warn: Callable[[str], None]) -> None:
        """run: the run's name. warn: receives the warning, in the thread. Raises as `webhook_url` does."""
        self._config, self._run, self._warn = config, run, warn
        self._url = webhook_url(config) if config.url is not None else None
        self._changed = threading.Condition()
        self._waiting: deque[dict[str, Any]] = deque()  # the first one is being sent
        self._thread: threading.Thread | None = None
        self._closing, self._lost, self._warned = False, 0, False
        self._may_warn = threading.Lock()

    def send(self, event: Event, cause: str, step: int) -> None:
        """Send a message about `event` at `step`, if the recipe selects it. Returns at once. cause: of it, or details."""
        if self._url is None or event not in self._config.events:
            return
        message = message_of(event, cause, step, self._run)
        with self._changed:
            if self._closing:
                self._lost += 1
                return
            if len(self._waiting) == MOST_WAITING:
                del self._waiting[1]
                self._lost += 1
            self._waiting.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name="alerts", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float = LAST_SECONDS) -> str | None:
        """Wait at most `seconds` until all messages are sent, and end the thread.

        Returns a sentence about messages that were not sent and that no warning has named; None if there are none.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, seconds)
            unsent = self._lost + len(self._waiting)
        with self._may_warn:
            further = unsent - self._warned
            self._warned = True  # the thread may still wait for an answer
        return (
            f"{pluralize(further, 'alert')} of observe.alerts {'was' if further == 1 else 'were'} not sent"
            if further
            else None
        )

    def __enter__(self) -> Alerts:
        return self

    def __exit__(self, *_: object) -> None:
        unsent = self.close()
        if unsent is not None:
            self._warn(unsent)

    # --- in the thread -------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        assert self._url is not None
        with Webhook(self._url, self._config.format) as webhook:
            while (message := self._next()) is not None:
                self._deliver(webhook, message)
                with self._changed:
                    self._waiting.popleft()
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closing, _BETWEEN)

    def _next(self) -> dict[str, Any] | None:
        """Wait for a message and return it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _deliver(self, webhook: Webhook, message: dict[str, Any]) -> None:
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                webhook.post(message)
            except WebhookError as error:
                if attempt == ATTEMPTS or not error.passing:
                    self._fail(message, error)
                    return
                with self._changed:  # at the end, one more attempt at once, then with the first wait
                    self._changed.wait_for(lambda: self._closing, wait)
                wait *= WAIT_FACTOR
            else:
                return

    def _fail(self, message: dict[str, Any], error: WebhookError) -> None:
        with self._changed:
            self._lost += 1
        with self._may_warn:
            if self._warned:
                return
            self._warned = True
            with contextlib.suppress(OSError):  # of a full disk: the run's next write reports it
                self._warn(
                    f"the webhook of observe.alerts did not receive the event '{message['event']}': {error}. Further failures "
                    "are counted at the end of the run."
                )


def message_of(event: Event, cause: str, step: int, run: str) -> dict[str, Any]:
    """Return the fields of a message. Of `cause`, the first line is sent: further lines may be output of processes."""
    host, cause = socket.gethostname(), first_line(cause)
    cause = cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]}…"
    return {
        "text": f"megarl: {run}: {_HEADS[event]} at step {step} on {host}: {cause}",
        "run": run,
        "host": host,
        "event": event,
        "step": step,
        "cause": cause,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
