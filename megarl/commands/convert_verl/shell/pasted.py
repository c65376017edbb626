"""Text that was pasted from a page: Markdown's fences, and placeholders that bash would read as redirections."""

from __future__ import annotations

import re

_FENCE = re.compile(r"\s*(```+|~~~+)\s*[\w+-]*\s*")
_REDIRECTED = re.compile(r"(?<==)<([^<>()|&;$`'\"\\\n]+)>(?=\s|$)")
_PLACEHOLDER = re.compile(
    r"<[^<>]+>|\b(?:path[/-]to|your|change-?me|replace-?me)\b|(?:^|/)(?:x{3,}|\.{3})(?:/|$)", re.IGNORECASE
)


def is_placeholder(text: str) -> bool:
    """Return whether a value stands for another one that the reader of a script chooses, as in ``/path/to/model``."""
    return bool(_PLACEHOLDER.search(text.replace("_", "-")))


def without_fences(text: str) -> tuple[str, list[str]]:
    """Return a script without Markdown's fences and the text outside of them, and a note. Line numbers stay.

    Fences count only at the first or the last line with text; a script may write others to a file.
    """
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE.fullmatch(line)]
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if not fences or not {filled[0], filled[-1]} & {*fences}:
        return text, []
    inside = len(fences) % 2 == 1 and fences[0] != filled[0]  # the beginning of the first block was not pasted
    outside: list[int] = []
    for number, line in enumerate(lines):
        if number in fences:
            inside = not inside
        elif not inside and line.strip():
            outside.append(number)
        if number in fences or number in outside:
            lines[number] = ""
    places = ", ".join(str(number + 1) for number in fences)
    note = f"line {fences[0] + 1}: Markdown's fences are not part of the script and were left out (lines {places})"
    if outside:
        note += f", and so was the text outside of them (lines {', '.join(str(number + 1) for number in outside)})"
    return "\n".join(lines), [note]


def with_quoted_placeholders(text: str) -> str:
    """Quote each ``<...>`` after an equals sign: bash would read from and write to files instead. Quoted ones stay."""

    def quoted(match: re.Match[str]) -> str:
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        is_quoted = any(before.count(quote) % 2 for quote in "'\"")
        return match[0] if is_quoted else f"'{match[0]}'"

    return _REDIRECTED.sub(quoted, text)
