"""Apply the rules to a run: the only entry to this package for the log, the report and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megarl.observe.advice import learning, liveness, speed, updates
from megarl.observe.advice.facts import Facts
from megarl.observe.advice.rule import RULES, Rule

_ORDER = [module.__name__ for module in (liveness, updates, learning, speed)]

Advice = dict[str, Any]
"""A finding as in summary.json: ``rule``, ``kind`` and the fields of `RuleFinding`."""


def rules() -> list[Rule]:
    """Return all rules, most important first: by module, then in its order."""
    return sorted(RULES, key=lambda rule: _ORDER.index(rule.find.__module__))


def advise(run: Facts) -> list[Advice]:
    """Return the findings about a run, most important first; none without its settings."""
    if not run.settings:
        return []
    findings = ((rule, rule.find(run)) for rule in rules())
    return [
        {"rule": rule.name, "kind": rule.kind, **asdict(finding)} for rule, finding in findings if finding is not None
    ]


def advice_text(advice: Mapping[str, Any]) -> str:
    """Return a finding as one line: what, evidence, changes, note."""
    changes = f". Try {' or '.join(advice['changes'])}" if advice["changes"] else ""
    note = f". {advice['note']}" if advice["note"] else ""
    return f"{advice['what']}: {advice['evidence']}{changes}{note}"


def advice_lines(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the last lines of a run on a terminal that show `findings`; no lines without any."""
    lines = ["advice:"] if findings else []
    for advice in findings:
        lines.append(f"  {advice['what']}: {advice['evidence']}")
        lines += [f"    try {' or '.join(advice['changes'])}"] if advice["changes"] else []
        lines += [f"    {advice['note']}"] if advice["note"] else []
    return lines
