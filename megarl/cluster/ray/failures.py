"""Failure messages for Ray actors that died or did not start."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from megarl.cluster.failures import Failure, ProcessInfo

LEFT_BEFORE_START = "its machine has left the Ray cluster before the process had started"


def not_started(place: ProcessInfo, seconds: float) -> Failure:
    """Failure of a process that Ray has not started within `seconds` on its reserved device."""
    return Failure(
        place,
        f"Ray has not started its process within {seconds:.0f} s, although its device is reserved: its "
        "machine is lost or overloaded. `ray status` shows what Ray waits for; Ray's logs are under /tmp/ray.",
    )


def death_cause(error: RayActorError) -> str:
    """Describe in one line how an actor's process ended, from Ray's report."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return (
            "Ray cannot reach its process, which may still run: its machine is overloaded or cut off from the network"
        )
    if code := re.search(r"exit code (\d+)", text):
        return f"its process exited with code {code.group(1)}"
    if "memory" in text and "killed" in text and "End of file" not in text:
        return f"Ray killed its process, because memory ran out: {text.splitlines()[-1]}"
    if "End of file" in text or not isinstance(error, ActorDiedError):
        return (
            "its process ended without a message: killed (SIGKILL, as the kernel does when memory runs out), "
            "crashed in native code, or its machine is lost"
        )
    return text.splitlines()[-1].strip()
