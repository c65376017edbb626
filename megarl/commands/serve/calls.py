"""Calls that wait for the thread of the trainers, and their answers, which the client fetches by the id of its request."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from megarl.exit_status import Terminated

MOST_WAITING = 256  # calls that wait for the trainers
MOST_ANSWERS, MOST_ANSWER_BYTES = 8192, 512 << 20  # kept until they are fetched


class TooManyCalls(RuntimeError):
    """More calls wait than the server accepts; the client should try again later."""


class ServerEnds(RuntimeError):
    """A call to a server that ends."""


@dataclass(frozen=True)
class CallAnswer:
    """The body of a finished call. error: the message if it failed; `by_caller`: the caller caused it."""

    body: bytes = b""
    is_protobuf: bool = False
    error: str | None = None
    by_caller: bool = False


@dataclass(frozen=True)
class KeptAnswer:
    """An answer, perhaps of a running call. session: of the client that fetches it."""

    session: str
    future: Future[CallAnswer]


class CallAnswers:
    """Answers by request id. Fetched ones, and finished ones of sessions that have ended, are forgotten. Thread-safe.

    has_ended: whether the session of this id has ended, so that its client fetches no more answers.
    """

    def __init__(self, has_ended: Callable[[str], bool]) -> None:
        self._has_ended = has_ended
        self._lock = threading.Lock()
        self._answers: dict[str, KeptAnswer] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()  # bytes
        self._bytes = 0

    def make_room(self) -> None:
        """Forget what can be forgotten if there are too many answers. Raises TooManyCalls if that is not enough.

        Call it before a call starts: one that has started must have a place for its answer.
        """
        if len(self._answers) >= MOST_ANSWERS:
            self.forget_ended()
        with self._lock:
            if len(self._answers) >= MOST_ANSWERS:
                self._forget(0)
            if len(self._answers) >= MOST_ANSWERS:
                raise TooManyCalls(f"{MOST_ANSWERS:,} answers wait to be fetched")

    def add(self, request_id: str, session: str, answer: Future[CallAnswer]) -> None:
        with self._lock:
            self._answers[request_id] = KeptAnswer(session, answer)

    def end(self, error: str) -> None:
        """Answer the calls that have no answer yet with `error`."""
        with self._lock:
            for kept in self._answers.values():
                settle(kept.future, CallAnswer(error=error))

    def get(self, request_id: str) -> KeptAnswer | None:
        """Return the answer; None if the id is unknown, or its answer was forgotten."""
        with self._lock:
            return self._answers.get(request_id)

    def forget_ended(self) -> None:
        """Forget the finished answers of sessions that have ended."""
        with self._lock:
            for request_id, kept in [*self._answers.items()]:
                if kept.future.done() and self._has_ended(kept.session):
                    del self._answers[request_id]
                    self._bytes -= self._fetched.pop(request_id, 0)

    def fetched(self, request_id: str, size: int) -> None:
        """Note that the client has fetched an answer of `size` bytes. It is kept for a while: the response may have been lost."""
        with self._lock:
            if request_id in self._answers and request_id not in self._fetched:
                self._fetched[request_id], self._bytes = size, self._bytes + size
            self._forget(MOST_ANSWER_BYTES)

    def _forget(self, keep_bytes: int) -> None:
        while self._fetched and (self._bytes > keep_bytes or len(self._fetched) > MOST_ANSWERS // 2):
            request_id, size = self._fetched.popitem(last=False)
            self._bytes -= size
            del self._answers[request_id]


class TrainerCalls:
    """Calls in the order of their submission, all made by one thread: the one that runs `serve`."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Callable[[], CallAnswer], Future[CallAnswer]]] = queue.Queue(MOST_WAITING)
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._ended: str | None = None  # the error of calls that come after the end

    def check_open(self) -> None:
        """Raise ServerEnds if the server ends."""
        if self._ended is not None:
            raise ServerEnds(self._ended)

    def end(self, error: str) -> None:
        """Answer the waiting calls with `error`, and refuse new ones."""
        with self._lock:
            self._ended = error
            while not self._waiting.empty():
                settle(self._waiting.get_nowait()[1], CallAnswer(error=error))

    def submit(self, call: Callable[[], CallAnswer]) -> Future[CallAnswer]:
        """Queue a call. Raises TooManyCalls and ServerEnds."""
        future: Future[CallAnswer] = Future()
        with self._lock:
            self.check_open()
            try:
                self._waiting.put_nowait((call, future))
            except queue.Full:
                raise TooManyCalls(f"{MOST_WAITING} calls wait for the trainers") from None
        return future

    def serve(self, check: Callable[[], None]) -> None:
        """Make the calls until `stop` is set. `check` is called every second without a call.

        A ValueError of a call is the caller's; another exception is answered, and ends the server.
        """
        while not self.stop.is_set():
            try:
                call, future = self._waiting.get(timeout=1.0)
            except queue.Empty:
                check()
                continue
            try:
                settle(future, call())
            except ValueError as error:
                settle(future, CallAnswer(error=str(error), by_caller=True))
            except BaseException as error:
                settle(future, CallAnswer(error=end_text(error)))
                raise


def settle(future: Future[CallAnswer], answer: CallAnswer) -> bool:
    """Give a call its answer unless it has one. Returns whether it had none."""
    try:
        future.set_result(answer)
    except InvalidStateError:
        return False
    return True


def end_text(error: BaseException) -> str:
    """Return the error of calls that the end of the server interrupts."""
    if isinstance(error, KeyboardInterrupt | Terminated):
        return "the server was stopped before this call was complete"
    return f"the server ends: {type(error).__name__}: {error}"
