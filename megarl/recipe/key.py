"""Declaration of a recipe key in the schema."""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_PROCESSES = 100_000
"""Engines or trainers of a run: ten times the largest cluster that was reported."""


def key(
    default: Any, doc: str, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> Any:
    """Declare a recipe key: its default, its text for docs/recipes.md, and the bounds that the recipe check enforces."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"doc": doc, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):  # a section: a fresh instance for each recipe
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
