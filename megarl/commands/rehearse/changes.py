"""Changes from a recipe and its model to their tiny copy, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_ALWAYS = ("model.dtype", "train.source", "algorithm.advantage", "algorithm.loss", "algorithm.aggregation")
"""Settings that are listed even if they have their defaults."""

Outcome = Literal["kept", "reduced", "left out"]


@dataclass(frozen=True)
class Change:
    """The outcome for one setting. `key` is a key of the recipe, or `config.json: FIELD`.

    kept: the value `before` is unchanged. reduced: `after` replaces it. left out: the setting has no effect.
    """

    outcome: Outcome
    key: str
    before: Any
    after: Any = None
    reason: str = ""


@dataclass
class Changes:
    """A list of changes in the order of their recording."""

    items: list[Change] = field(default_factory=list)

    def kept(self, key: str, value: Any, reason: str = "") -> None:
        self.items.append(Change("kept", key, value, value, reason))

    def note(self, outcome: Outcome, key: str, before: Any, after: Any, reason: str) -> None:
        self.items.append(Change(outcome, key, before, after, reason))

    def left_out(self, key: str, before: Any, reason: str) -> None:
        self.items.append(Change("left out", key, before, None, reason))

    def set(self, section: Any, key: str, value: Any, reason: str) -> None:
        """Set the field of `section` that `key` ends with, and record the change if the value differs."""
        name = key.rpartition(".")[2]
        before = getattr(section, name)
        if before != value:
            setattr(section, name, value)
            self.items.append(Change("reduced", key, before, value, reason))


def leaf_settings(section: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Iterate over (dotted key, value) of all settings that differ from their defaults, in nested sections too."""
    default = type(section)()
    for each in dataclasses.fields(section):
        value, key = getattr(section, each.name), f"{prefix}{each.name}"
        if dataclasses.is_dataclass(value):
            yield from leaf_settings(value, f"{key}.")
        elif isinstance(value, dict):
            for name, item in value.items():
                nested = dataclasses.is_dataclass(item)
                yield from leaf_settings(item, f"{key}.{name}.") if nested else [(f"{key}.{name}", item)]
        elif value != getattr(default, each.name) or key in _ALWAYS:
            yield key, value
