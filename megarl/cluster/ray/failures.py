"""What is said of an actor that did not start, or died."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, RayActorError

from megarl.cluster.failures import Failure, Place


def not_started(place: Place, seconds: float) -> Failure:
    """Of a process that Ray has not started for `seconds` on the device that is reserved for it."""
    return Failure(
        place,
        f"Ray has not started its process within {seconds:.0f} s, on a device that is reserved for it: its "
        "machine is gone or overloaded. `ray status` shows what Ray waits for; its logs are under /tmp/ray.",
    )


def death_cause(error: RayActorError) -> str:
    """How an actor's process ended, in a line: as much as Ray knows of it."""
    text = str(error)
    if code := re.search(r"exit code (\d+)", text):
        return f"its process exited with code {code.group(1)}"
    if "memory" in text and "killed" in text and "End of file" not in text:
        return f"Ray killed its process, because memory ran out: {text.splitlines()[-1]}"
    if "End of file" in text or not isinstance(error, ActorDiedError):
        return (
            "its process ended without a word: killed (SIGKILL, as the kernel does when memory runs out), "
            "crashed in native code, or its machine is gone"
        )
    return text.splitlines()[-1].strip()
