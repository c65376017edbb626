"""docs/advice.md lists the rules of advice."""

from __future__ import annotations

from docs.generate.advice import PAGE, document


def test_the_page_is_generated() -> None:
    assert PAGE.read_text() == document(), "run python -m docs.generate.advice"
