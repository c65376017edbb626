"""Declaration of a recipe key in the schema, and the types of keys."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import yaml

from megarl.errors import plain

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


@functools.cache
def section_types(section: type) -> dict[str, Any]:
    """Return the resolved type of each field of a schema dataclass."""
    return typing.get_type_hints(section)


def type_of(section: type, dotted: str) -> Any:
    """Return the type of a dotted key below `section`; None if the schema does not have the key."""
    kind: Any = section
    for name in dotted.split("."):
        if typing.get_origin(kind) is dict:  # the user chooses its keys
            kind = typing.get_args(kind)[1]
        else:
            kind = section_types(typing.cast("type", kind)).get(name) if dataclasses.is_dataclass(kind) else None
    return kind


def type_name(kind: Any) -> str:
    """Format the type of a key for messages: ``float or null``."""
    if typing.get_origin(kind) is typing.Union:
        parts = [_plain_type(part) for part in typing.get_args(kind) if part is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in typing.get_args(kind) else parts)
    return _plain_type(kind)


def without_none(kind: Any) -> Any:
    """Return X for Optional[X], and any other type unchanged."""
    kinds = [part for part in typing.get_args(kind) if part is not type(None)]
    return kinds[0] if typing.get_origin(kind) is typing.Union and len(kinds) == 1 else kind


def choices_of(kind: Any) -> list[str] | None:
    """Return the values of a Literal in YAML's syntax; None for another type."""
    kind = without_none(kind)
    return list(map(yaml_word, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else None


def yaml_word(value: Any) -> str:
    """Format a plain value as YAML does: true, null, 0.5."""
    return value if isinstance(value, str) else plain(value)


def _plain_type(kind: Any) -> str:
    if (choices := choices_of(kind)) is not None:
        return " | ".join(choices)
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def is_text(section: type, dotted: str) -> bool:
    """Return True if a dotted key below `section` is a text, or a text or null."""
    return without_none(type_of(section, dotted)) is str


class RecipeDumper(yaml.SafeDumper):
    """Writes recipes. Quotes texts that recipes read as numbers and YAML 1.1 does not, such as 12e3."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


RecipeDumper.add_representer(str, _represent_text)
