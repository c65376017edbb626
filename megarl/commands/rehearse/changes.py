"""What became of a recipe and its model in the twin, in plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_ALWAYS = ("model.dtype", "train.source", "algorithm.advantage", "algorithm.loss", "algorithm.aggregation")
"""Told of even where they are the defaults."""

Fate = Literal["kept", "reduced", "left out"]


@dataclass(frozen=True)
class Change:
    """`key`: of the recipe, or `config.json: FIELD`. kept: `given` runs as it is. reduced: `now` stands in its place.
    left out: nothing of it runs. `why`: in words."""

    fate: Fate
    key: str
    given: Any
    now: Any = None
    why: str = ""


@dataclass
class Changes:
    """Collects them, in order."""

    found: list[Change] = field(default_factory=list)

    def kept(self, key: str, value: Any, why: str = "") -> None:
        self.found.append(Change("kept", key, value, value, why))

    def note(self, fate: Fate, key: str, given: Any, now: Any, why: str) -> None:
        self.found.append(Change(fate, key, given, now, why))

    def left_out(self, key: str, given: Any, why: str) -> None:
        self.found.append(Change("left out", key, given, None, why))

    def set(self, section: Any, key: str, value: Any, why: str) -> None:
        """Give the setting that `key` ends with another value, and note it where it is another. `section`: the
        dataclass that has it."""
        name = key.rpartition(".")[2]
        given = getattr(section, name)
        if given != value:
            setattr(section, name, value)
            self.found.append(Change("reduced", key, given, value, why))


def settings_of(section: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted key, value) of every setting of a recipe's section that is not the default, those of its sections and of
    mappings included."""
    default = type(section)()
    for each in dataclasses.fields(section):
        value, key = getattr(section, each.name), f"{prefix}{each.name}"
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.")
        elif isinstance(value, dict):
            for name, item in value.items():
                nested = dataclasses.is_dataclass(item)
                yield from settings_of(item, f"{key}.{name}.") if nested else [(f"{key}.{name}", item)]
        elif value != getattr(default, each.name) or key in _ALWAYS:
            yield key, value
