"""What ``python -m megarl doctor [RECIPE] [KEY=VALUE ...]`` does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megarl.commands.doctor.catalogue import CHECKS
from megarl.commands.doctor.check import run_check, within
from megarl.commands.doctor.finding import Finding, Needs, fail, warning
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.nodes import NodeReport, look_everywhere, report_of
from megarl.commands.doctor.recipe import ALL_NODES, device_demand, environment, needs_of, run_name, stages, weights
from megarl.commands.doctor.system import write_token
from megarl.preflight.load import load_recipe
from megarl.recipe import Recipe
from megarl.recipe.paths import with_absolute_paths

_PREFLIGHT_SECONDS = 3600.0  # as long as reading and tokenising the data takes: what the run is spared then
_WIDTH = 18  # of the column of names

Say = Callable[[str], None]


def doctor(recipe_path: Path | None, overrides: Sequence[str], *, as_json: bool, nodes: bool | None) -> int:
    """Look, print a line a check (or `as_json` a list of objects), and return 1 where a check failed, else 0.

    nodes: look at every node of the Ray cluster; None: where an address of one is known. Raises RecipeError where the
    recipe does not load.
    """
    recipe = None if recipe_path is None else with_absolute_paths(load_recipe(recipe_path, overrides))
    machine = Machine()
    needs = needs_of(recipe, machine.environ)
    if nodes and not needs.ray_address:
        needs = dataclasses.replace(needs, ray_address="auto")
    everywhere = bool(needs.ray_address) if nodes is None else nodes
    say: Say = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        findings = _all(machine, needs, recipe, everywhere, say)
    if as_json:
        print(json.dumps([as_object(finding) for finding in findings], indent=1))
    failed, warned = (sum(one.status == status for one in findings) for status in ("FAIL", "warning"))
    say(f"{failed} failed, {warned} to look at, {len(findings) - failed - warned} ok")
    return 1 if failed else 0


def _all(machine: Machine, needs: Needs, recipe: Recipe | None, everywhere: bool, say: Say) -> list[Finding]:
    reports: list[NodeReport] | None = None
    findings: list[Finding] = []
    if everywhere:
        reports, problem = _look_everywhere(machine, needs)
        findings += _told([] if problem is None else [problem], say)
    elif needs.nodes > 1:
        alone = warning(f"{needs.nodes} nodes, and this one alone is looked at", f"start {ALL_NODES} on each of them")
        findings += _told([dataclasses.replace(alone, check="node", host=machine.host)], say)
    if reports is None:
        own = [one for each in CHECKS for one in _told(run_check(each, machine, needs), say)]
        findings += own
        reports = [report_of(machine, needs, own)]
    else:
        for report in failing_first(reports):
            for text in node_lines(report):
                say(text)
            findings += report.findings
    if recipe is not None:
        findings += _recipe(machine, recipe, reports, say)
    return findings


def _look_everywhere(machine: Machine, needs: Needs) -> tuple[list[NodeReport] | None, Finding | None]:
    """Of all nodes; or why there are no reports of them, and then this machine is looked at by itself."""
    token = write_token(needs.runs_dir)
    try:
        return look_everywhere(dataclasses.replace(needs, token=token)), None
    except (ValueError, ImportError) as error:
        remedy = "looked at is this machine alone: correct cluster.ray_address or RAY_ADDRESS, or say --no-nodes"
        said = fail(" ".join(str(error).split()), remedy)
        return None, dataclasses.replace(said, check="node", host=machine.host)
    finally:
        if token is not None:
            Path(token[0]).unlink(missing_ok=True)


def _recipe(machine: Machine, recipe: Recipe, reports: Sequence[NodeReport], say: Say) -> list[Finding]:
    """What the recipe adds; read on this machine, as the controller would."""
    machines = [(report.host, report.devices) for report in reports]
    parts: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("recipe: model", lambda: list(stages(recipe))),
        ("recipe: devices", lambda: [device_demand(recipe, reports[0].device, machines)]),
        ("recipe: weights", lambda: weights(recipe)),
        ("recipe: environment", lambda: environment(recipe, reports[0].device)),
        ("recipe: run", lambda: [run_name(recipe)]),
    ]
    findings = []
    for name, work in parts:
        found = within(work, _PREFLIGHT_SECONDS)
        named = [dataclasses.replace(one, check=one.check or name, host=machine.host) for one in found]
        findings += _told(named, say)
    return findings


def _told(findings: Iterable[Finding], say: Say) -> list[Finding]:
    told = list(findings)
    for finding in told:
        say(line(finding))
    return told


def line(finding: Finding) -> str:
    """One line: how it is, of what, what was found, what to do."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:<8} {finding.check:<{_WIDTH}} {finding.text}{remedy}"


def failing_first(reports: Iterable[NodeReport]) -> list[NodeReport]:
    """Those with failures first, then those with warnings; among them the order is kept."""

    def worst(report: NodeReport) -> int:
        states = {finding.status for finding in report.findings}
        return 0 if "FAIL" in states else 1 if "warning" in states else 2

    return sorted(reports, key=worst)


def node_lines(report: NodeReport) -> list[str]:
    """Of one of many nodes: what is not ok, failures first, and how much is."""
    who = f"node rank {report.rank} ({report.host})" if report.rank is not None else f"node {report.host}"
    wrong = [one for one in report.findings if one.status != "ok"]
    wrong.sort(key=lambda one: one.status != "FAIL")
    good = len(report.findings) - len(wrong)
    return [f"{who}: {good} of {len(report.findings)} ok"] + [f"  {line(one)}" for one in wrong]


def as_object(finding: Finding) -> dict[str, object]:
    """As --json writes it; `rank` where the node has one."""
    named = dataclasses.asdict(finding)
    if finding.rank is None:
        del named["rank"]
    order = ("check", "status", "text", "remedy", "host", "rank")
    return {name: named[name] for name in order if name in named}
