"""Python's garbage collector during imports."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Run a block of imports without garbage collection, and exempt its objects from later collections.

    Modules live until the process ends, but the collector visits all of their objects again and again while it looks for cycles
    (0.3 s for vLLM's). Objects of the whole process are exempted (`gc.freeze`), so the block must not make what is to be collected.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
