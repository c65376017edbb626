"""A check: a function over a machine and what it is wanted for. Whatever becomes of one, the others run."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megarl.commands.doctor.finding import Finding, Needs, fail
from megarl.commands.doctor.machine import Machine

AT_LIMIT = "it did not end within {seconds:.0f} s"
Function = Callable[[Machine, Needs], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """`looks_at`: what it holds to what, for docs/doctor.md. `seconds`: after which it is given up. A check that yields
    nothing does not concern the machine."""

    name: str
    looks_at: str
    function: Function
    seconds: float


def check(name: str, looks_at: str, *, seconds: float = 15.0) -> Callable[[Function], Check]:
    """The decorated function, as a `Check`."""
    return lambda function: Check(name, looks_at, function, seconds)


def run_check(one: Check, machine: Machine, needs: Needs) -> list[Finding]:
    """The check's lines. One that raises, or does not end in time, is itself a failure."""
    found = within(lambda: list(one.function(machine, needs)), one.seconds)
    return [dataclasses.replace(finding, check=one.name, host=machine.host) for finding in found]


def within(work: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """What `work` returns; a failure where it raises, or has not returned after `seconds`: it is left behind then, in a
    thread of its own, since nothing ends a call into a file system that hangs."""
    found: list[Any] = []

    def attempt() -> None:
        try:
            found.extend(work())
        except Exception as error:  # noqa: BLE001 - a check that cannot be made is something to be told
            said = " ".join(str(error).split())
            remedy = "this is a fault of the check, or of what it asked: report it with this line"
            found.append(fail(f"the check itself failed: {type(error).__name__}: {said}", remedy))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        remedy = "look for a file system or a device that does not answer (df; what shows the devices' state)"
        return [fail(AT_LIMIT.format(seconds=seconds), remedy)]
    return found
