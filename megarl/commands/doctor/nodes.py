"""The checks of every node of a Ray cluster, and what only a look at all of them shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster.ray import env
from megarl.commands.doctor.catalogue import CHECKS
from megarl.commands.doctor.check import run_check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import platform_of, torch_sees
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.versions import SETS

SECONDS = 240.0  # that all checks of a node may take
_CLOCK_APART = 1.0  # seconds; less is no trouble to anyone
_COMPARED = sorted({name for one in SETS for name in one.packages})


@dataclass(frozen=True)
class NodeReport:
    """Of one node; `device` and `devices`: what it would run on, and how many there are."""

    host: str
    rank: int | None
    findings: list[Finding]
    device: str = "cpu"
    devices: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(finding.status == "FAIL" for finding in self.findings)


def look(machine: Machine, needs: Needs) -> NodeReport:
    """All checks of one machine."""
    findings = [finding for one in CHECKS for finding in run_check(one, machine, needs)]
    return report_of(machine, needs, findings)


def report_of(machine: Machine, needs: Needs, findings: list[Finding]) -> NodeReport:
    """What was found of a machine, and what others are compared by."""
    device = platform_of(machine, needs).kind.name
    versions = {name: version for name in _COMPARED if (version := machine.version(name)) is not None}
    versions["Python"] = ".".join(map(str, machine.python[:2]))
    return NodeReport(machine.host, None, findings, device, len(torch_sees(machine).names), versions)


def look_here(needs: Needs) -> NodeReport:
    """As `look`, on the node that this runs on."""
    return look(Machine(), needs)


def look_everywhere(needs: Needs) -> list[NodeReport]:
    """Of every node of the cluster at `needs.ray_address`. Raises ValueError, with the remedy, where it cannot be joined."""
    env.prepare(private=False)
    from megarl.commands.run_on_all_nodes import on_every_node

    def arguments(nodes: int) -> tuple[Needs]:
        return (dataclasses.replace(needs, nodes=nodes),)

    answers = on_every_node(needs.ray_address, "megarl.commands.doctor.nodes:look_here", arguments, SECONDS)
    return compared(answers)


def compared(answers: Sequence[Any]) -> list[NodeReport]:
    """A report of each node's answer (`megarl.commands.run_on_all_nodes.NodeAnswer`), with a line on how it is beside the others."""
    common = _common([answer.value.versions for answer in answers if not answer.error])
    reports = []
    for answer in answers:
        own = answer.value if not answer.error else NodeReport(answer.host, answer.rank, [])
        findings = [*_node(answer, common), *own.findings]
        findings = [dataclasses.replace(one, host=answer.host, rank=answer.rank) for one in findings]
        reports.append(dataclasses.replace(own, host=answer.host, rank=answer.rank, findings=findings))
    return reports


def _node(answer: Any, common: dict[str, str]) -> list[Finding]:
    if answer.error:
        remedy = "look at that node: is Ray running there, and megarl installed as here? (ray status)"
        return [dataclasses.replace(fail(answer.error, remedy), check="node")]
    versions, found = answer.value.versions, []
    other = [
        f"{name} {versions.get(name, 'not installed')} (there {common.get(name, 'not installed')})"
        for name in sorted({*versions, *common})
        if versions.get(name) != common.get(name)
    ]
    if other:
        found.append(fail(f"other versions than on most nodes: {', '.join(other)}", "use one image on every node"))
    if abs(answer.clock_ahead) - answer.clock_error > _CLOCK_APART:
        said = f"its clock is {answer.clock_ahead:+.1f} s from the controller's"
        found.append(warning(said, "start chronyd or systemd-timesyncd there: logs and traces cannot be compared"))
    said = f"answers; its clock is within {abs(answer.clock_ahead) + answer.clock_error:.2f} s of the controller's"
    return [dataclasses.replace(one, check="node") for one in found or [ok(said)]]


def _common(each: Sequence[dict[str, str]]) -> dict[str, str]:
    """Of each package the version that most nodes have; without those that most have not."""
    names = {name for versions in each for name in versions}
    most = {name: Counter(versions.get(name) for versions in each).most_common(1)[0][0] for name in names}
    return {name: version for name, version in most.items() if version is not None}
