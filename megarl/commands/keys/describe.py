"""Descriptions of all recipe keys, from the schema's dataclasses: for `megarl keys` and docs/recipes.md."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.recipe.key import section_types, yaml_word
from megarl.recipe.schema import Recipe

_BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))


@dataclass(frozen=True)
class KeyDescription:
    """A recipe key: its dotted name, type and default as text, choices (empty: any value of the type), bounds and meaning."""

    key: str
    type: str
    default: Any  # a plain value
    choices: tuple[str, ...]
    bounds: tuple[str, ...]  # such as "at least 1"
    meaning: str


@dataclass(frozen=True)
class Section:
    """A section of the recipe and its keys. name: dotted; "" for the top level. meaning: text of docs/recipes.md."""

    name: str
    meaning: str
    keys: tuple[KeyDescription, ...]


def sections(section: type = Recipe, name: str = "", meaning: str = "") -> Iterator[Section]:
    """Yield all sections of the recipe, each before its inner ones."""
    types, prefix = section_types(section), f"{name}." if name else ""
    keys, inner = [], []
    for field in dataclasses.fields(section):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            inner.append((typing.cast("type", kind), f"{prefix}{field.name}"))
        else:
            keys.append(_describe(field, kind, f"{prefix}{field.name}"))
    yield Section(name, meaning, tuple(keys))
    for kind, dotted in inner:
        assert kind.__doc__
        yield from sections(kind, dotted, " ".join(kind.__doc__.split()))


def type_text(kind: Any) -> str:
    """Return a type as text: ``list[str]``, ``null | int``, and the values of a Literal between backquotes."""
    if typing.get_origin(kind) is typing.Union:
        return " | ".join("null" if part is type(None) else type_text(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(f"`{word}`" for word in _choices(kind))
    return kind.__name__ if not typing.get_args(kind) else re.sub(r"(?:\w+\.)+(\w+)", r"\1", str(kind))


def _describe(field: dataclasses.Field[Any], kind: Any, dotted: str) -> KeyDescription:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    bounds = tuple(f"{label} {field.metadata[name]:g}" for name, label in _BOUNDS if name in field.metadata)
    choices = tuple(word for part in (kind, *typing.get_args(kind)) for word in _choices(part))
    return KeyDescription(dotted, type_text(kind), default, choices, bounds, field.metadata["doc"])


def _choices(kind: Any) -> tuple[str, ...]:
    return tuple(map(yaml_word, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else ()
