r"""Extract the answer of a LaTeX response: the content of the last ``\boxed{...}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace behind a backslash is text


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of `text`; None if there is none or its braces do not close.

    The box that opens last counts, as in verl: ``\boxed{a = \boxed{2}}`` gives ``2``. Takes time linear in the text.
    """
    last = None
    for last in _BOX.finditer(text):  # noqa: B007 -- only the last match is used
        pass
    if last is None:
        return None
    return in_braces(text, last.end())


def in_braces(text: str, start: int) -> str | None:
    """Return the text from `start`, right after an opening brace, to its closing brace; None if it does not close."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None
