"""Run a command of megarl in a child process that stops with this one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from megarl.cluster.process import die_with_parent

STOP_SECONDS = 60.0  # time limit for an interrupted child to stop
STOPPED = (130, 143)  # exit statuses after SIGINT or SIGTERM


def run_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path | None = None,
    stop_seconds: float | None = STOP_SECONDS,
) -> int:
    """Run a command and return its exit status. `folder`: where it runs; None: here.

    If this process is interrupted, the command receives the signal and gets `stop_seconds` to clean up (None: until a second signal). If it then reports that it
    was stopped, this process exits with the same status and without another message. If this process is killed, the command
    receives SIGTERM (on Linux).
    """
    # A new session, since Ctrl-C would otherwise reach both processes, and both would report it.
    stop = partial(die_with_parent, signal.SIGTERM)
    with (
        _hangup_as_sigterm(),
        subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, preexec_fn=stop) as process,
    ):
        try:
            return process.wait()
        except BaseException as error:
            by_hand = isinstance(error, KeyboardInterrupt)
            process.send_signal(signal.SIGINT if by_hand else signal.SIGTERM)
            try:
                status = process.wait(stop_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also after a second interrupt
                if process.poll() is None:
                    process.kill()  # leaving the `with` block waits for the process
            if status in STOPPED:
                raise SystemExit(status) from None
            raise


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
