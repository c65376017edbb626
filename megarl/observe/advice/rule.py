"""A rule of advice, its finding, and the registry of all rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megarl.observe.advice.facts import Facts

Kind = Literal["liveness", "learning", "speed"]


@dataclass(frozen=True)
class RuleFinding:
    """A fault of a run.

    ``what``: the fault, one line. ``evidence``: numbers with their steps. ``changes``: settings as ``key=value``, the most
    promising first; try one at a time. ``note``: what else to know or to do, or "".
    """

    what: str
    evidence: str
    changes: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule. ``condition`` and ``reason`` are for docs/advice.md: when it applies, and why there (a source, or an argument)."""

    name: str
    kind: Kind
    condition: str
    reason: str
    find: Callable[[Facts], RuleFinding | None]


RULES: list[Rule] = []
"""All rules, in the order of their import; `advise.rules` sorts them."""


def rule(
    kind: Kind, condition: str, reason: str
) -> Callable[[Callable[[Facts], RuleFinding | None]], Callable[[Facts], RuleFinding | None]]:
    """Register the decorated function under its name."""

    def register(find: Callable[[Facts], RuleFinding | None]) -> Callable[[Facts], RuleFinding | None]:
        RULES.append(Rule(find.__name__, kind, condition, reason, find))
        return find

    return register
