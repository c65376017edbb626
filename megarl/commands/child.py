"""Run a command of megarl in a child process that stops with this one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence

_STOP_SECONDS = 60.0  # time limit for an interrupted child to stop
_STOPPED = (130, 143)  # exit statuses after SIGINT or SIGTERM


def run_child(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command and return its exit status.

    If this process is interrupted, the command receives the signal and gets time to clean up. If it then reports that it
    was stopped, this process exits with the same status and without another message.
    """
    # A new session, since Ctrl-C would otherwise reach both processes, and both would report it.
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException as error:
            by_hand = isinstance(error, KeyboardInterrupt)
            process.send_signal(signal.SIGINT if by_hand else signal.SIGTERM)
            try:
                status = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also after a second interrupt
                if process.poll() is None:
                    process.kill()  # leaving the `with` block waits for the process
            if status in _STOPPED:
                raise SystemExit(status) from None
            raise
