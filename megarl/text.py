"""Words that depend on a number. Pure."""

from __future__ import annotations


def several(count: int, word: str, of_many: str | None = None) -> str:
    """``1 -> "1 layout"``, ``1200 -> "1,200 layouts"``; `of_many` where it is not the word with an s."""
    return f"{count:,} {word if count == 1 else of_many or f'{word}s'}"
