"""Checks of every node of a Ray cluster, and comparisons between the nodes."""

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
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import platform_of, torch_sees
from megarl.commands.doctor.versions import installed_versions

SECONDS = 240.0  # time limit for all checks of a node
_MAX_CLOCK_OFFSET = 1.0  # seconds


@dataclass(frozen=True)
class NodeReport:
    """Findings of one node, its kind of device ("" if it did not answer), the number of its devices, and its package
    versions."""

    host: str
    rank: int | None
    findings: list[Finding]
    device: str = ""
    devices: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def report_of(machine: Machine, needs: Needs, findings: list[Finding]) -> NodeReport:
    """Build the report of a machine from its findings, its devices and its package versions."""
    device = platform_of(machine, needs).kind.name
    versions = installed_versions(machine) | {"Python": ".".join(map(str, machine.python[:2]))}
    return NodeReport(machine.host, None, findings, device, len(torch_sees(machine).names), versions)


def check_this_node(needs: Needs) -> NodeReport:
    """Run all checks on the node that this process runs on."""
    machine = Machine()
    findings = [finding for check in CHECKS for finding in run_check(check, machine, needs)]
    return report_of(machine, needs, findings)


def check_all_nodes(needs: Needs) -> list[NodeReport]:
    """Run all checks on every node of the cluster at `needs.ray_address`.

    Raises ValueError, with the remedy in its text, if the cluster cannot be joined.
    """
    env.prepare(private=False)
    from megarl.commands.run_on_all_nodes import on_every_node

    def arguments(nodes: int) -> tuple[Needs]:
        return (dataclasses.replace(needs, nodes=nodes),)

    answers = on_every_node(needs.ray_address, "megarl.commands.doctor.nodes:check_this_node", arguments, SECONDS)
    return compared(answers)


def compared(answers: Sequence[Any]) -> list[NodeReport]:
    """Turn the answers (`megarl.commands.run_on_all_nodes.NodeAnswer`) into reports that also compare the nodes."""
    common = _common([answer.value.versions for answer in answers if not answer.error])
    reports = []
    for answer in answers:
        report = answer.value if not answer.error else NodeReport(answer.host, answer.rank, [])
        findings = [*_node(answer, common), *report.findings]
        findings = [dataclasses.replace(finding, host=answer.host, rank=answer.rank) for finding in findings]
        reports.append(dataclasses.replace(report, host=answer.host, rank=answer.rank, findings=findings))
    return reports


def _node(answer: Any, common: dict[str, str]) -> list[Finding]:
    if answer.error:
        remedy = "check that this node runs Ray (ray status) and has megarl installed"
        return [fail(answer.error, remedy).labelled("node")]
    versions, findings = answer.value.versions, []
    different = [
        f"{name} {versions.get(name, 'not installed')} (most nodes: {common.get(name, 'not installed')})"
        for name in sorted({*versions, *common})
        if versions.get(name) != common.get(name)
    ]
    if different:
        findings.append(fail(f"versions differ from most nodes: {', '.join(different)}", "use one image on every node"))
    if abs(answer.clock_ahead) - answer.clock_error > _MAX_CLOCK_OFFSET:
        text = f"its clock is {answer.clock_ahead:+.1f} s from the controller's"
        findings.append(warning(text, "start chronyd or systemd-timesyncd there: logs and traces cannot be compared"))
    text = f"answers; its clock is within {abs(answer.clock_ahead) + answer.clock_error:.2f} s of the controller's"
    return [finding.labelled("node") for finding in findings or [ok(text)]]


def _common(nodes: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the most frequent version of each package. Packages that most nodes lack are left out."""
    names = {name for versions in nodes for name in versions}
    most = {name: Counter(versions.get(name) for versions in nodes).most_common(1)[0][0] for name in names}
    return {name: version for name, version in most.items() if version is not None}
