r"""Extract the answer of a LaTeX response: the content of the last ``\boxed{...}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BARE = re.compile(r"\\boxed[ \t]{1,8}(?=[^\s{])")
_BARE_END = re.compile(r"\$|\n|\\\)|\\\]")  # the end of the formula or line
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace behind a backslash is text


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of `text`; None if there is none or its braces do not close.

    The box that opens last counts, as in verl: ``\boxed{a = \boxed{2}}`` gives ``2``. Takes time linear in the text.
    """
    last = _last_match(_BOX, text)
    return in_braces(text, last.end()) if last is not None else None


def last_boxed_or_bare(text: str) -> str | None:
    r"""Return `last_boxed` or, in a text without ``\boxed{``, what follows the last ``\boxed `` without braces.

    ``\boxed 7$`` gives ``7``: the answer ends with the formula (``$``, ``\)``, ``\]``) or the line, without a last period.
    """
    if _BOX.search(text) is not None:
        return last_boxed(text)
    last = _last_match(_BARE, text)
    if last is None:
        return None
    end = _BARE_END.search(text, last.end())
    return text[last.end() : end.start() if end is not None else len(text)].strip().removesuffix(".")


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 -- only the last match is used
        pass
    return last


def in_braces(text: str, start: int) -> str | None:
    """Return the text from `start`, right after an opening brace, to its closing brace; None if it does not close."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None
