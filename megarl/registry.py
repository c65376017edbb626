"""Named functions: how a recipe's word becomes code.

>>> LOSSES = Registry("policy loss")
>>> @LOSSES.register("reinforce")
... def reinforce(inputs, settings): ...
>>> LOSSES["reinforce"]  # an unknown name raises, with the nearest known one
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

T = TypeVar("T")


def import_own(module: str) -> ModuleType:
    """Import a module of the user's own, from the current directory or PYTHONPATH. Raises what importing raises."""
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command, unlike python -m, leaves the current directory out
        sys.path.insert(0, here)
    return importlib.import_module(module)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a slip of, or None."""
    known = list(known)
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else None


class Registry(Generic[T]):
    """A read-only mapping from names to what was registered under them."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"there is a {self.kind} '{name}' already: choose another name")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(self.unknown(name))
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)

    def unknown(self, name: str) -> str:
        close = nearest(name, self._entries)
        hint = f"; did you mean '{close}'?" if close else "."
        return f"there is no {self.kind} '{name}'{hint} Known: {', '.join(self.names())}."
