"""Errors in what a user wrote or gave: a recipe, a file, an option. Commands end with exit status 2 for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec

_NO_VALUE = object()
_P = ParamSpec("_P")


def plain(value: Any) -> str:
    """Format `value` as a recipe writes it."""
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


class RecipeError(ValueError):
    """A recipe that cannot run: where it was written, the key and its value, the problem, and what to change."""

    def __init__(self, key: str, problem: str, remedy: str, *, value: Any = _NO_VALUE, origin: str | None = None):
        self.key, self.problem, self.remedy, self.origin = key, problem, remedy, origin
        self.value = value
        super().__init__(str(self))

    @property
    def all(self) -> tuple[ValueError, ...]:
        """The errors that were found together: this error alone, unless it is a `RecipeErrors`."""
        return (self,)

    @property
    def setting(self) -> str:
        """The key, with its value if there is one: ``train.steps = 0``."""
        return self.key if self.value is _NO_VALUE else f"{self.key} = {plain(self.value)}"

    def __str__(self) -> str:
        return block(where=self.origin, key=self.setting, what=self.problem, do=self.remedy)


class RecipeErrors(RecipeError):
    """Two or more errors of one recipe, in the order of the checks.

    `key`, `value`, `problem`, `remedy` and `origin` are those of the first RecipeError among them. The text has a block for
    each error and their number.
    """

    def __init__(self, errors: Sequence[ValueError]):
        self._errors = tuple(errors)
        first = next((error for error in errors if isinstance(error, RecipeError)), None)
        if first is None:
            first = RecipeError("recipe", str(errors[0]), "")
        super().__init__(first.key, first.problem, first.remedy, value=first.value, origin=first.origin)

    @property
    def all(self) -> tuple[ValueError, ...]:
        return self._errors

    def __str__(self) -> str:
        blocks = [str(error) if isinstance(error, RecipeError) else block(what=str(error)) for error in self._errors]
        return "\n".join([*blocks, f"\n{len(blocks)} errors"])


class NotHereError(RecipeError):
    """A recipe needs something that this machine lacks at present and another machine may have."""


class InputError(ValueError):
    """A file, data or an argument from the user cannot be used. Raised before any process starts."""


def block(**lines: str | None) -> str:
    """Format labelled lines as error messages show them; empty ones are left out."""
    return "".join(f"\n  {label:<6} {text}" for label, text in lines.items() if text)


def errors_of(check: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Iterator[ValueError]:
    """Call `check` and yield the errors that it raises."""
    try:
        check(*args, **kwargs)
    except ValueError as error:
        yield from all_of(error)


def all_of(error: ValueError) -> tuple[ValueError, ...]:
    """Return the errors that `error` stands for."""
    return error.all if isinstance(error, RecipeError) else (error,)


def raise_all(errors: Iterable[ValueError]) -> None:
    """Raise the independent ones of `errors` together: a single error as it is, more as RecipeErrors."""
    kept = independent(errors)
    if len(kept) == 1:
        raise kept[0]
    if kept:
        raise RecipeErrors(kept)


def independent(errors: Iterable[ValueError]) -> list[ValueError]:
    """Return `errors` without repetitions and without those that may follow from an earlier one.

    An error may follow from an earlier one if one of the two names the other's key: correcting the earlier one may remove it.
    """
    kept: list[ValueError] = []
    for error in errors:
        if not any(str(earlier) == str(error) or _related(earlier, error) for earlier in kept):
            kept.append(error)
    return kept


def _related(first: ValueError, second: ValueError) -> bool:
    return _concerns(first, second) or _concerns(second, first)


def _concerns(error: ValueError, other: ValueError) -> bool:
    """Return whether `other` names the key of `error`, or a section that it is in."""
    if not isinstance(error, RecipeError):
        return False
    if isinstance(other, RecipeError) and _is_within(error.key, other.key):
        return True
    return "." in error.key and _mentions(error.key, str(other))


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _mentions(key: str, text: str) -> bool:
    """Return whether `text` has `key` as a whole: `a.b`, or `a.b.c` within it, but not `a.bc` or `x.a.b`."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


@contextlib.contextmanager
def as_recipe_error(key: str, remedy: str, value: Any = _NO_VALUE) -> Iterator[None]:
    """Raise a ValueError of the body as a RecipeError of the setting `key`. A RecipeError passes unchanged."""
    try:
        yield
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(key, str(error), remedy, value=value) from error


@contextlib.contextmanager
def as_input_error() -> Iterator[None]:
    """Raise a ValueError of the body as an InputError. A RecipeError passes unchanged."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
