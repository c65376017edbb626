"""Run a command of megarl in a child process that stops with this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from megarl.cluster.process import die_with_parent
from megarl.cluster.sigstop_watch import LOOK_SECONDS
from megarl.errors import COMMAND, command_name

STOP_SECONDS = 60.0  # time limit for an interrupted child to stop
STOPPED = (130, 143)  # exit statuses after SIGINT or SIGTERM
_POLL_SECONDS = 0.02
SIGNALS = 3  # that the child receives: it saves a checkpoint, completes one that is being written, abandons it


def run_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path | None = None,
    stop_seconds: float | None = STOP_SECONDS,
    is_lost: Callable[[int], bool] = lambda pid: False,
) -> int:
    """Run a command and return its exit status. `folder`: where it runs; None: here.

    If this process is interrupted, the command receives the signal and gets `stop_seconds` to clean up (None: any time). A second
    and a third signal are passed on, too; one more kills it. If it then reports that it was stopped, this process exits with the same
    status and without another message. If this process is killed, the command receives SIGTERM (on Linux). is_lost: looks at the
    process, every `LOOK_SECONDS`, and returns whether it has to be killed. Messages of the child name megarl's command as this process
    does.
    """
    # A new session, since Ctrl-C would otherwise reach both processes, and both would report it.
    stop = partial(die_with_parent, signal.SIGTERM)
    environ = {**environ, COMMAND: command_name()}
    with (
        _hangup_as_sigterm(),
        subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, preexec_fn=stop) as process,
    ):
        try:
            return _wait(process, is_lost)
        except BaseException as error:
            status = _stop(process, error, stop_seconds)
            if status in STOPPED:
                raise SystemExit(status) from None
            raise


def _wait(process: subprocess.Popen[bytes], is_lost: Callable[[int], bool]) -> int:
    while not ends_within(process.pid, LOOK_SECONDS):
        if is_lost(process.pid):
            _send(process, signal.SIGKILL)
    return process.wait()


def _stop(process: subprocess.Popen[bytes], signalled: BaseException, seconds: float | None) -> int | None:
    """Pass on the signal that has raised `signalled`, and the next ones. Returns the exit status; None if the process was killed."""
    for _ in range(SIGNALS):
        _send(process, signal.SIGINT if isinstance(signalled, KeyboardInterrupt) else signal.SIGTERM)
        try:
            if ends_within(process.pid, seconds):
                return process.wait()
            break
        except BaseException as again:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt are signals here; the caller raises the first
            signalled = again
    _send(process, signal.SIGKILL)  # leaving the caller's `with` block waits for the process
    return None


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal without `Popen.send_signal`, which takes the lock of `Popen.wait`. Nothing happens after the end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def ends_within(pid: int, seconds: float | None) -> bool:
    """Wait until a child process has ended, at most `seconds` (None: any time). Does not fetch its exit status.

    `Popen.wait(timeout)` cannot be interrupted safely: if a signal handler raises when it has just taken its lock, the lock stays
    taken, and each later wait hangs.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # its exit status was fetched already
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
    return True


@contextlib.contextmanager
def _hangup_as_sigterm() -> Iterator[None]:
    """Handle SIGHUP, which the end of an SSH session sends, as SIGTERM. With `nohup` it stays ignored."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
