"""Ctrl-C and SIGTERM that arrive where Python cannot raise an exception."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

_SECONDS = 0.05  # by then the callback has ended


def raise_again(signals: Mapping[type[BaseException], int]) -> None:
    """From now on, send a signal again if its exception was lost. `signals`: exceptions of handlers, and their signals.

    Python reports and drops an exception that leaves a finalizer or a function that runs around a fork, such as those of
    `logging`. A Ctrl-C dropped there would leave a traceback, and the command would go on.
    """
    report = sys.unraisablehook

    def hook(lost: Any) -> None:
        number = signals.get(lost.exc_type)
        if number is None:
            report(lost)
            return
        timer = threading.Timer(_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
