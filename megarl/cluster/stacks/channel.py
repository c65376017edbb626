"""Ask processes of this machine for their stacks, over a Unix socket that a thread of each process serves.

The sockets are in a folder that only this user can open. A request is one byte, or a byte and a line of words for the controller
of a run. An answer is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.process import private_directory
from megarl.cluster.sigstop_watch import process_fields
from megarl.cluster.stacks.capture import ProcessStacks, capture
from megarl.sandbox.usage import stat, tree

REQUEST_SECONDS = 1.0  # time for a reader to send its request, and for a process to accept it
ANSWER_SECONDS = 5.0  # time for a process to answer
SEND_SECONDS = 10.0  # time for a reader to accept an answer
MOST_ANSWERS = 8  # at a time; further readers wait
SPY_SECONDS = 20.0  # time limit of py-spy
_LONGEST_LINE = 1000  # bytes of a request with words
_SHORT, _FULL, _WORDS = b"s", b"f", b"w"

AnswerWords = Callable[[list[str]], Any]


def socket_path(pid: int, user: int) -> Path:
    """Path of a process's socket. Not in TMPDIR, which may differ between the processes of a run."""
    return Path("/tmp") / f"megarl-stacks-{user}" / str(pid)


def serve_stacks() -> None:
    """Answer requests for this process's stacks from now on, in a thread."""
    _serve(lambda full: capture(full))


def _no_words(words: list[str]) -> dict[str, str]:
    return {"problem": f"this process does not answer {' '.join(words)!r}"}


@contextlib.contextmanager
def answering(answer: Callable[[bool], Any], answer_words: AnswerWords = _no_words) -> Iterator[None]:
    """Answer requests with `answer(full)`, or `answer_words(words)`, while the block runs. They are called in a thread and return
    plain values."""
    listener = _serve(answer, answer_words)
    try:
        yield
    finally:
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()
            socket_path(os.getpid(), os.getuid()).unlink(missing_ok=True)


def _serve(answer: Callable[[bool], Any], answer_words: AnswerWords = _no_words) -> socket.socket | None:
    path = socket_path(os.getpid(), os.getuid())
    listener = socket.socket(socket.AF_UNIX)
    try:
        private_directory(path.parent)
        for old in path.parent.iterdir():
            if old.name.isdigit() and not process_fields(int(old.name)):
                old.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
    except (OSError, ValueError) as error:  # the run works without it
        print(f"megarl: the stacks of this process cannot be read by other processes: {error}", flush=True)
        return None
    arguments = (listener, answer, answer_words)
    threading.Thread(target=_accept, args=arguments, name="megarl-stacks", daemon=True).start()
    return listener


def _accept(listener: socket.socket, answer: Callable[[bool], Any], answer_words: AnswerWords) -> None:
    """Answer each reader in a separate thread: the stacks of a whole run can take minutes. Requests with words, which may change
    the run, are answered one after the other."""
    slots, words_lock = threading.Semaphore(MOST_ANSWERS), threading.Lock()

    def answer_in_turn(words: list[str]) -> Any:
        with words_lock:
            return answer_words(words)

    def serve(connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # the reader has left
                _answer(connection, answer, answer_in_turn)
        finally:
            slots.release()

    while True:
        slots.acquire()
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=serve, args=(connection,), name="megarl-stacks", daemon=True).start()


def _answer(connection: socket.socket, answer: Callable[[bool], Any], answer_words: AnswerWords) -> None:
    connection.settimeout(REQUEST_SECONDS)
    kind, words = connection.recv(1), list[str]()
    if kind == _WORDS:
        with connection.makefile("rb") as stream:
            words = stream.readline(_LONGEST_LINE).decode(errors="replace").split()
    try:
        reply = answer_words(words) if kind == _WORDS else answer(kind == _FULL)
    except Exception as error:  # noqa: BLE001 -- the reader reports it
        reply = {"problem": f"its answer failed: {type(error).__name__}: {error}"}
    connection.settimeout(SEND_SECONDS)
    connection.sendall(json.dumps(reply).encode())


def request(pid: int, user: int, full: bool) -> socket.socket:
    """Request the stacks of a process. Raises OSError if it cannot be reached."""
    return _send(pid, user, _FULL if full else _SHORT)


def request_words(pid: int, user: int, words: Sequence[str]) -> socket.socket:
    """Request the answer of a run's controller to `words`. Raises OSError if it cannot be reached."""
    return _send(pid, user, _WORDS + " ".join(words).encode() + b"\n")


def _send(pid: int, user: int, message: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(REQUEST_SECONDS)
    try:
        connection.connect(str(socket_path(pid, user)))
        connection.sendall(message)
    except OSError:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, deadline: float) -> Any:
    """Return the answer to a request. Raises OSError or ValueError if there is none by `deadline` (time.monotonic())."""
    data = b""
    with connection:
        while True:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                return json.loads(data)
            data += part


def read_stacks(pids: Sequence[int], full: bool) -> list[ProcessStacks]:
    """Return the states of processes of this machine and user; a process that does not answer has a `problem`."""
    connections: list[socket.socket | OSError] = []
    for pid in pids:
        try:
            connections.append(request(pid, os.getuid(), full))
        except OSError as error:
            connections.append(error)
    deadline = time.monotonic() + ANSWER_SECONDS
    return [with_system_facts(pid, _state(c, deadline), full) for pid, c in zip(pids, connections, strict=True)]


def _state(connection: socket.socket | OSError, deadline: float) -> ProcessStacks:
    if isinstance(connection, OSError):
        return {"problem": f"its socket cannot be reached: {connection}"}
    try:
        answer: ProcessStacks = receive(connection, deadline)
    except TimeoutError:
        return {
            "problem": f"it has not answered within {ANSWER_SECONDS:.0f} s: native code holds Python's lock (the GIL)"
        }
    except (OSError, ValueError) as error:
        return {"problem": f"its answer was cut off: {error}"}
    return answer


def with_system_facts(pid: int, stacks: ProcessStacks, full: bool) -> ProcessStacks:
    """Add facts from /proc and, to a full state of a silent process, its stacks as py-spy reads them."""
    problem = stacks.get("problem", "")
    fields = process_fields(pid)
    facts: ProcessStacks = {
        "problem": problem,
        "state": fields[0] if fields else "",
        "io_bytes": _io_bytes(pid),
        "cpu_ticks": _cpu_ticks(pid, itself=bool(problem)),
    }
    if problem and full:
        facts["outside"] = _spy(pid)
    return {**stacks, **facts}


def _io_bytes(pid: int) -> int:
    """Bytes that a process has read and written, without sockets."""
    try:
        counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:  # ended, or not Linux
        return 0
    return sum(int(counters[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _cpu_ticks(pid: int, itself: bool) -> int:
    """Clock ticks of a process's children, their children included, and of the process too if `itself`."""
    return sum(sum(stat(each)[13 if each == pid and not itself else 11 : 15]) for each in tree(pid))


def _spy(pid: int) -> list[str]:
    """Return the stacks of a process as lines of py-spy, or a line that says why there are none."""
    command = shutil.which("py-spy")
    if command is None:
        return ["(its stack cannot be read from outside: py-spy is not installed on its machine)"]
    try:
        done = subprocess.run([command, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=SPY_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"(py-spy has not read its stack within {SPY_SECONDS:.0f} s)"]
    if done.returncode:
        return [f"(py-spy cannot read its stack: {' '.join(done.stderr.split())})"]
    threads = done.stdout.partition("\nThread ")[2]  # after lines about the process, such as its command
    return f"Thread {threads}".splitlines()
