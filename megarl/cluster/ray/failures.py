"""Failure messages for Ray actors that died or did not start."""

from __future__ import annotations

import re
from dataclasses import replace

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from megarl.cluster.failures import Failure, ProcessInfo

LEFT_BEFORE_START = "its machine has left the Ray cluster before the process had started"


def not_started(place: ProcessInfo, seconds: float) -> Failure:
    """Failure of a process that has not reported its start within `seconds` on its reserved device."""
    if place.pid:
        return Failure(
            place,
            f"its process has not reported its start within {seconds:.0f} s: its machine is overloaded, or it hangs in an import "
            f"(output: {place.log or 'none'}).",
        )
    return Failure(
        place,
        f"Ray has not started its process within {seconds:.0f} s, although its device is reserved: its "
        "machine is lost or overloaded. `ray status` shows what Ray waits for; Ray's logs are under /tmp/ray.",
    )


def located(place: ProcessInfo, error: RayActorError) -> ProcessInfo:
    """Return `place` with the process id of Ray's report, if it has one and `place` has none.

    Such a process has not opened its log: the file has an earlier process's output.
    """
    pid = re.search(r"^\s*pid: (\d+)$", str(error), re.MULTILINE)
    return replace(place, pid=int(pid.group(1)), log="") if pid and not place.pid else place


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
