"""Turn exceptions and signals of a command into one error block and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import typer

from megarl.errors import InputError, RecipeError, with_kind

_SECONDS = 0.05  # delay until the callback that dropped the exception has ended


def raise_again(signals: Mapping[type[BaseException], int]) -> None:
    """Send a signal again whenever Python drops its exception. `signals`: signal number by the handler's exception.

    Python prints and drops an exception that leaves a finalizer or an at-fork function (`logging` has some). After a
    dropped Ctrl-C the command would print a traceback and continue.
    """
    report = sys.unraisablehook

    def hook(dropped: Any) -> None:
        number = signals.get(dropped.exc_type)
        if number is None:
            report(dropped)
            return
        timer = threading.Timer(_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


# Base class of typer's argument errors. Some releases bundle click, so that `click.ClickException` is another class.
_UsageProblem: Any = typer.BadParameter.__mro__[typer.BadParameter.__mro__.index(Exception) - 1]


INTERRUPTED = 130


def leave(status: int) -> NoReturn:
    """Exit with `status`; after a failure without Python's finalization.

    All files are closed and processes ended by then. Library threads that were interrupted during their start can crash
    the finalization, which would hide the status.
    """
    if status == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class HiddenFromTyper(Exception):
    """Wraps an error so that typer does not swallow it: typer turns EOFError into Ctrl-C, and ends silently at a broken pipe."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run_unwrapped(command: Callable[[], Any]) -> Any:
    """Run `command`; raise the error inside a `HiddenFromTyper`."""
    try:
        return command()
    except HiddenFromTyper as wrapped:
        error = wrapped.error
    raise error


def guarded(command: Callable[[], Any], *, debug: bool) -> int:
    """Run `command` and return its exit status; print any exception as one block on stderr."""
    signal.signal(signal.SIGTERM, _terminate)
    raise_again({KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM})
    try:
        status = _run_unwrapped(command)
        if status == INTERRUPTED:  # typer's status for Ctrl-C
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except _UsageProblem as error:
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("stopped by SIGTERM", file=sys.stderr)
        return 143
    except (RecipeError, InputError) as error:
        return _fail(2, error, debug)
    except Exception as error:  # noqa: BLE001 - any other error is printed as one block too
        return _fail(1, error, debug)


class Terminated(BaseException):
    """SIGTERM, e.g. from a cluster manager, as an exception: `finally` blocks run and end all started processes."""


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def _fail(status: int, error: Exception, debug: bool) -> int:
    if os.environ.get("RANK", "0") != "0":
        return status  # rank 0 prints the error
    print(with_kind(error), file=sys.stderr)
    for note in vars(error).pop("__notes__", ()):  # the traceback would show them again
        print(note, file=sys.stderr)
    if debug:
        traceback.print_exc()
        print(getattr(getattr(error, "failure", None), "traceback", None) or "", file=sys.stderr)  # remote traceback
    elif status == 1:
        print("(--debug shows the traceback)", file=sys.stderr)
    return status
