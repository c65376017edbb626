"""Last lines of a plan: does the recipe fit, and which commands come next?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megarl.commands.plan.count.types import RecipePlan
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.needed import shortage
from megarl.commands.plan.search.search import SearchResult
from megarl.commands.plan.show.search_console import overrides_of
from megarl.commands.plan.show.tables import console_width
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.errors import command_name, pluralize

_COMMAND = "    "  # indent of a command
_SSH = "launch/ssh.sh hosts"


def show(lines: Sequence[str]) -> None:
    """Print a verdict, with commands unwrapped, since users copy them."""
    console = Console(width=console_width())
    for line in ("", *lines):
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith(_COMMAND))


def of_plan(plan: RecipePlan, path: Path, settings: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the verdict on a plan of the recipe `path`, and what to do next. settings: overrides. options: of this `plan`."""
    if plan.refusals:
        verdict = f"does not fit, for {pluralize(len(plan.refusals), 'reason')} (REFUSED above)"
        if plan.suggestions:
            fitting = [*settings, *plan.suggestions[0].overrides.split(), *options]
            return _lines(verdict, "the first layout above that fits", _command("plan", path, fitting))
        search = _command("plan", path, [*settings, *options, "--search"])
        return _lines(verdict, "change the keys of REFUSED, use more devices, or search for a layout", search)
    if plan.memory is None:
        again = _command("plan", path, [*settings, *options, "--device", "H100"])
        return _lines(
            "not compared with a device, since none is known",
            "name the device of the run, e.g. H100, 910B or CPU",
            again,
        )
    checks = pluralize(len(plan.unchecked), "check")
    unknown = [f"engines of {section}" for section in plan.not_counted]
    unknown += [] if all(stage.activations for stage in plan.stages) else ["activations"]
    if unknown:
        verdict = f"not known: the counted memory fits, but the memory of {', '.join(unknown)} is not counted"
    else:
        verdict = f"fits {plan.device.name if plan.device else 'the device'}{_least_room(plan)}"
    if plan.unchecked:
        verdict += f"; {checks} could not run here (Not checked above)"
    if (nodes := sum(host.nodes for host in plan.hosts)) > 1:
        recipe = " ".join(shlex.quote(text) for text in (str(path), *settings))
        doctor, train = f"bash {_SSH} -- python -m megarl doctor {recipe}", f"bash {_SSH} {recipe}"
        return _lines(
            verdict, f"on all {nodes} nodes, listed in the file hosts (docs/tutorials/many_nodes.md)", doctor, train
        )
    commands = [_command(name, path, settings) for name in ("doctor", "train")]
    return _lines(verdict, "on a machine of the run", *commands)


def of_search(
    subject: Subject, result: SearchResult, path: Path, settings: Sequence[str], options: Sequence[str]
) -> list[str]:
    """Return the verdict of a search, and what to do next. settings: overrides. options: of this `plan`."""
    if not result.best:
        longer = ", or search longer with --seconds" if result.not_reached else ""
        needed = f". {text.removesuffix('.')}" if (text := shortage(subject)) else ""
        verdict = f"no layout was found that fits {sized(subject.limit)}{needed}"
        return _lines(verdict, f"use more or larger devices{longer}")
    best = result.best[0]
    fitting = [*settings, *overrides_of(subject, best.choice), *options]
    verdict = f"{pluralize(len(result.best), 'layout')} found; the fastest takes {best.seconds:.1f} s a step, estimated"
    return _lines(verdict, "plan the fastest", _command("plan", path, fitting))


def _least_room(plan: RecipePlan) -> str:
    used = [place for place in plan.places if place.uses]
    if plan.memory is None or not used:
        return ""
    fullest = max(used, key=lambda place: place.peak.total)
    unit, left = Unit.of(plan.memory * GIB), plan.memory * GIB - fullest.peak.total
    return f": {unit.tenths(left)} of {unit.whole(plan.memory * GIB)} {unit.name} are left ({fullest.name}, {fullest.peak.phase})"


def _command(name: str, path: Path, settings: Sequence[str]) -> str:
    return " ".join([command_name(), name, *(shlex.quote(text) for text in (str(path), *settings))])


def _lines(verdict: str, following: str, *commands: str) -> list[str]:
    return [
        f"Verdict: {verdict}.",
        f"Next: {following}{':' if commands else '.'}",
        *(_COMMAND + each for each in commands),
    ]
