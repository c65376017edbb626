"""Text formatting. Pure functions."""

from __future__ import annotations


def pluralize(count: int, word: str, plural: str | None = None) -> str:
    """Return the count with its noun: ``1 -> "1 layout"``, ``1200 -> "1,200 layouts"``. `plural` defaults to `word` + s."""
    return f"{count:,} {word if count == 1 else plural or f'{word}s'}"


def cut_middle(text: str, longest: int) -> str:
    """Return `text`, or its two ends with a note if it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out here …]\n{text[len(text) - half :]}"
