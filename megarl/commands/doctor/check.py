"""Checks of a machine. A check that raises or hangs fails; the others still run."""

from __future__ import annotations

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
    """One check. `description` is its row in docs/doctor.md; `seconds` is its time limit.

    `function` yields nothing on a machine that the check does not apply to.
    """

    name: str
    description: str
    function: Function
    seconds: float


def check(name: str, description: str, *, seconds: float = 15.0) -> Callable[[Function], Check]:
    """Turn the decorated function into a `Check`."""
    return lambda function: Check(name, description, function, seconds)


def run_check(check: Check, machine: Machine, needs: Needs) -> list[Finding]:
    """Run one check and return its findings. An exception or a timeout becomes a finding that fails."""
    findings = within(lambda: list(check.function(machine, needs)), check.seconds)
    return [finding.labelled(check.name, machine.host) for finding in findings]


def within(job: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Return the findings of `job`, or one failure if it raises or takes longer than `seconds`.

    After a timeout `job` stays behind in a daemon thread: a call into a file system that hangs cannot be ended.
    """
    findings: list[Any] = []

    def attempt() -> None:
        try:
            findings.extend(job())
        except Exception as error:  # noqa: BLE001 - any exception of a check becomes a finding
            problem = " ".join(str(error).split())
            remedy = "this is a bug in the check, or an unexpected answer of the system: report it with this line"
            findings.append(fail(f"the check raised {type(error).__name__}: {problem}", remedy))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        remedy = "look for a file system or a device that does not answer (df, the device's status command)"
        return [fail(AT_LIMIT.format(seconds=seconds), remedy)]
    return findings
