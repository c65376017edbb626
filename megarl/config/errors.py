"""The one error that a recipe can end in."""

from __future__ import annotations

from typing import Any

_NO_VALUE = object()


class RecipeError(ValueError):
    """Something a user wrote cannot be run. Says where, which key, what value, what is wrong and what to change."""

    def __init__(self, key: str, problem: str, remedy: str, *, value: Any = _NO_VALUE, origin: str | None = None):
        self.key, self.problem, self.remedy, self.origin = key, problem, remedy, origin
        self.value = value
        super().__init__(str(self))

    def __str__(self) -> str:
        said = self.key if self.value is _NO_VALUE else f"{self.key} = {self.value!r}"
        lines = [("where ", self.origin), ("key   ", said), ("what  ", self.problem), ("do    ", self.remedy)]
        return "\n".join(f"  {label} {text}" for label, text in lines if text)
