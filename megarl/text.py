"""Text formatting. Pure functions."""

from __future__ import annotations


def pluralize(count: int, word: str, plural: str | None = None) -> str:
    """Return the count with its noun: ``1 -> "1 layout"``, ``1200 -> "1,200 layouts"``. `plural` defaults to `word` + s."""
    return f"{count:,} {word if count == 1 else plural or f'{word}s'}"
