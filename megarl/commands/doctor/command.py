"""Entry point of ``python -m megarl doctor [RECIPE | RUN_DIRECTORY] [KEY=VALUE ...]``."""

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
from megarl.commands.doctor.live_run import show_live_run
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.nodes import NodeReport, check_all_nodes, report_of
from megarl.commands.doctor.platform_detection import platform_of
from megarl.commands.doctor.recipe import ALL_NODES, device_demand, environment, needs_of, run_name, stages, weights
from megarl.commands.doctor.system import write_token
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe import Recipe
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.paths import with_absolute_paths

_PREFLIGHT_SECONDS = 3600.0  # reading and tokenizing the data may take long; the run then reads it from the cache
_NAME_WIDTH = 18  # column of check names

Print = Callable[[str], None]


def doctor(recipe_path: Path | None, overrides: Sequence[str], *, as_json: bool, nodes: bool | None) -> int:
    """Run all checks, print one line per finding (or a JSON list), and return 1 if a check failed, else 0.

    nodes: check every node of the Ray cluster; None: only if a Ray address is set. The directory of a run instead of a
    recipe: show what the run's processes do. Raises RecipeError if the recipe does not load, InputError if no run is alive.
    """
    if recipe_path is not None and recipe_path.is_dir():
        if overrides or nodes is not None:
            raise InputError(
                f"{recipe_path} is the directory of a run: of the arguments for a recipe it takes only --json."
            )
        show_live_run(recipe_path, as_json=as_json)
        return 0
    recipe = None if recipe_path is None else _read(recipe_path, overrides)
    machine = Machine()
    needs = needs_of(recipe, machine.environ)
    if nodes and not needs.ray_address:
        needs = dataclasses.replace(needs, ray_address="auto")
    all_nodes = bool(needs.ray_address) if nodes is None else nodes
    write: Print = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        findings = _check_all(machine, needs, recipe, all_nodes, write)
    if as_json:
        print(json.dumps([as_object(finding) for finding in findings], indent=1))
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("FAIL", "warning"))
    write(f"{failed} failed, {warned} {'warning' if warned == 1 else 'warnings'}, {len(findings) - failed - warned} ok")
    return 1 if failed else 0


def _read(path: Path, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with absolute paths, and with files of the cache instead of names on the hub."""
    return with_cached_inputs(with_absolute_paths(load_recipe(path, overrides)))


def _check_all(machine: Machine, needs: Needs, recipe: Recipe | None, all_nodes: bool, write: Print) -> list[Finding]:
    reports: list[NodeReport] | None = None
    findings: list[Finding] = []
    if all_nodes:
        reports, problem = _check_nodes(machine, needs)
        findings += _printed([] if problem is None else [problem], write)
    elif needs.nodes > 1:
        text = f"{needs.nodes} nodes, and only this one is checked"
        finding = warning(text, f"start {ALL_NODES} on each of them")
        findings += _printed([finding.labelled("node", machine.host)], write)
    if reports is None:
        local = [finding for check in CHECKS for finding in _printed(run_check(check, machine, needs), write)]
        findings += local
        reports = [report_of(machine, needs, local)]
    else:
        for report in failing_first(reports):
            for text in node_lines(report):
                write(text)
            findings += report.findings
    if recipe is not None:
        findings += _recipe(machine, needs, recipe, reports, write)
    return findings


def _check_nodes(machine: Machine, needs: Needs) -> tuple[list[NodeReport] | None, Finding | None]:
    """Return the reports of all nodes, or the reason why the cluster cannot be reached."""
    token = write_token(needs.runs_dir)
    try:
        return check_all_nodes(dataclasses.replace(needs, token=token)), None
    except (ValueError, ImportError) as error:
        remedy = "only this machine is checked: correct cluster.ray_address or RAY_ADDRESS, or pass --no-nodes"
        return None, fail(" ".join(str(error).split()), remedy).labelled("node", machine.host)
    finally:
        if token is not None:
            Path(token[0]).unlink(missing_ok=True)


def _recipe(
    machine: Machine, needs: Needs, recipe: Recipe, reports: Sequence[NodeReport], write: Print
) -> list[Finding]:
    """Run the recipe's checks on this machine, as the controller would."""
    machines = [(report.host, report.devices) for report in reports]
    answered = [report.device for report in reports if report.device]
    device = answered[0] if answered else platform_of(machine, needs).kind.name
    parts: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("recipe: model", lambda: list(stages(recipe))),
        ("recipe: devices", lambda: [device_demand(recipe, device, machines)]),
        ("recipe: weights", lambda: weights(recipe, device)),
        ("recipe: environment", lambda: environment(recipe, device)),
        ("recipe: run", lambda: [run_name(recipe)]),
    ]
    findings = []
    for name, job in parts:
        findings += _printed(
            [finding.labelled(name, machine.host) for finding in within(job, _PREFLIGHT_SECONDS)], write
        )
    return findings


def _printed(findings: list[Finding], write: Print) -> list[Finding]:
    for finding in findings:
        write(line(finding))
    return findings


def line(finding: Finding) -> str:
    """Format one finding: status, check, text, remedy."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:<8} {finding.check:<{_NAME_WIDTH}} {finding.text}{remedy}"


def failing_first(reports: Iterable[NodeReport]) -> list[NodeReport]:
    """Sort reports by their worst status, failures first. The sort is stable."""

    def worst(report: NodeReport) -> int:
        states = {finding.status for finding in report.findings}
        return 0 if "FAIL" in states else 1 if "warning" in states else 2

    return sorted(reports, key=worst)


def node_lines(report: NodeReport) -> list[str]:
    """Summarize one of many nodes: the number of findings that are ok, then the others, failures first."""
    node = f"node rank {report.rank} ({report.host})" if report.rank is not None else f"node {report.host}"
    problems = [finding for finding in report.findings if finding.status != "ok"]
    problems.sort(key=lambda finding: finding.status != "FAIL")
    good = len(report.findings) - len(problems)
    return [f"{node}: {good} of {len(report.findings)} ok"] + [f"  {line(finding)}" for finding in problems]


def as_object(finding: Finding) -> dict[str, object]:
    """Convert a finding to an object of the --json list. `rank` is left out if it is None."""
    fields = dataclasses.asdict(finding)
    if finding.rank is None:
        del fields["rank"]
    order = ("check", "status", "text", "remedy", "host", "rank")
    return {name: fields[name] for name in order if name in fields}
