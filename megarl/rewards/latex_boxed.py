r"""Where a response of LaTeX puts its answer: the last ``\boxed{...}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace behind a backslash is text


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` of `text`; None: there is none, or its braces do not close.

    The last one that opens counts, as in verl: of ``\boxed{a = \boxed{2}}`` it is ``2``. Takes time linear in the text.
    """
    last = None
    for last in _BOX.finditer(text):  # noqa: B007 -- the last one is wanted
        pass
    if last is None:
        return None
    return in_braces(text, last.end())


def in_braces(text: str, start: int) -> str | None:
    """What stands from `start`, right behind an opening brace, to the brace that closes it; None: none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None
