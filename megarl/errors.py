"""What a command ends in when the fault lies in what it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_NO_VALUE = object()


def plain(value: Any) -> str:
    """`value` as a recipe writes it."""
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


class RecipeError(ValueError):
    """Something a user wrote cannot be run. Says where, which key, what value, what is wrong and what to change."""

    def __init__(self, key: str, problem: str, remedy: str, *, value: Any = _NO_VALUE, origin: str | None = None):
        self.key, self.problem, self.remedy, self.origin = key, problem, remedy, origin
        self.value = value
        super().__init__(str(self))

    def __str__(self) -> str:
        said = self.key if self.value is _NO_VALUE else f"{self.key} = {plain(self.value)}"
        lines = [("where ", self.origin), ("key   ", said), ("what  ", self.problem), ("do    ", self.remedy)]
        return "".join(f"\n  {label} {text}" for label, text in lines if text)


class NotHereError(RecipeError):
    """What is asked for may well be had, but not on this machine, now."""


class InputError(ValueError):
    """What a user gave (files, data, arguments) cannot be used; found before any process started."""


@contextlib.contextmanager
def as_recipe_error(key: str, remedy: str, value: Any = _NO_VALUE) -> Iterator[None]:
    """Whatever ValueError is raised in here is the fault of the setting `key`."""
    try:
        yield
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(key, str(error), remedy, value=value) from error


@contextlib.contextmanager
def as_input_error() -> Iterator[None]:
    """Whatever ValueError is raised in here is the input's fault."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
