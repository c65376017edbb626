"""Errors caused by user input, with which commands end with exit status 2, and the words of messages."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec

COMMAND = "MEGARL_COMMAND"  # in the environment of a child process: `command_name()` of its parent
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
        """All errors that this exception reports: itself, or every error of a `RecipeErrors`."""
        return (self,)

    @property
    def setting(self) -> str:
        """The key, with its value if there is one: ``train.steps = 0``."""
        return self.key if self.value is _NO_VALUE else f"{self.key} = {plain(self.value)}"

    def __str__(self) -> str:
        return block(where=self.origin, key=self.setting, what=self.problem, do=self.remedy)


class RecipeErrors(RecipeError):
    """Several errors of one recipe, in the order of the checks, or one with hidden errors.

    `key`, `value`, `problem`, `remedy` and `origin` are copied from the first RecipeError in `errors`. The text has a block
    for each error, followed by their count. `hidden`: number of errors that may follow from these and are not among them.
    """

    def __init__(self, errors: Sequence[ValueError], hidden: int = 0):
        self._errors, self._hidden = tuple(errors), hidden
        first = next((error for error in errors if isinstance(error, RecipeError)), None)
        if first is None:
            first = RecipeError("recipe", str(errors[0]), "")
        super().__init__(first.key, first.problem, first.remedy, value=first.value, origin=first.origin)

    @property
    def all(self) -> tuple[ValueError, ...]:
        return self._errors

    def __str__(self) -> str:
        blocks = [str(error) if isinstance(error, RecipeError) else block(what=str(error)) for error in self._errors]
        return join_blocks(blocks, self._hidden)


class ReadingError(RecipeError):
    """An unknown key or a value of a wrong type. It does not follow from another error."""


class NotHereError(RecipeError):
    """A recipe that cannot run on this machine now, but may run on another: a missing model, package or free directory."""


class InputError(ValueError):
    """A file, data or an argument from the user that cannot be used. Raised before any process starts."""


class ProcessFailure(RuntimeError):
    """A process of the run died, hung, lost a connection or raised: `train.restarts` starts the run again."""


class SpoiledWeights(RuntimeError):
    """Updates are skipped again and again: the newest checkpoint may have the cause. The message names the one to resume from."""


class Unavailable(RuntimeError):
    """A call of a scorer or tool that failed because the service behind it cannot be used now, through no fault of the sample."""

    is_outage = True  # False: the cause is not a service, so that calls of other samples may succeed
    after = 0.0  # seconds of waiting that the service asks for
    failures = 1  # failed attempts of the call


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the message of `error`, as ``BaseException.add_note``, which needs Python 3.11."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


def block(**lines: str | None) -> str:
    """Format `lines` (label -> text) as the block of an error message. Empty texts are left out."""
    return "".join(f"\n  {label:<6} {text}" for label, text in lines.items() if text)


def join_blocks(blocks: Sequence[str], hidden: int = 0) -> str:
    """Join the blocks of error messages, followed by the number of blocks, if several, and of hidden errors, if any."""
    counts = [f"{len(blocks)} errors"] if len(blocks) > 1 else []
    if hidden:
        counts.append(_hidden_text(hidden, len(blocks)))
    return "\n".join([*blocks, *([f"\n{' '.join(counts)}"] if counts else [])])


def _hidden_text(hidden: int, shown: int) -> str:
    """Describe errors that are not shown because they may follow from the `shown` ones."""
    more = "1 more error" if hidden == 1 else f"{hidden} more errors"
    return f"({more} may follow from {'this one' if shown == 1 else 'these'} and {'is' if hidden == 1 else 'are'} not shown)"


def errors_of(check: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Iterator[ValueError]:
    """Call `check` and yield the errors that it raises."""
    try:
        check(*args, **kwargs)
    except ValueError as error:
        yield from all_of(error)


def all_of(error: ValueError) -> tuple[ValueError, ...]:
    """Return all errors that `error` reports; see `RecipeError.all`."""
    return error.all if isinstance(error, RecipeError) else (error,)


def raise_all(errors: Iterable[ValueError]) -> None:
    """Raise the independent errors of `errors`, with the number of the others. Return if there is none.

    A single error is raised unchanged, several as RecipeErrors.
    """
    errors = list(errors)
    kept = independent(errors)
    hidden = hidden_errors(errors, kept)
    if len(kept) == 1 and not hidden:
        raise kept[0]
    if kept:
        raise RecipeErrors(kept, hidden)


def independent(errors: Iterable[ValueError]) -> list[ValueError]:
    """Drop repeated errors, and errors that a correction of an earlier error may remove.

    Two errors are related if one of them names the key of the other. The first of related errors is kept, and every
    `ReadingError`: the suggestion for an unknown key may name a key with a value of a wrong type.
    """
    kept: list[ValueError] = []
    for error in errors:
        if not any(str(earlier) == str(error) or _follows(error, earlier) for earlier in kept):
            kept.append(error)
    return kept


def hidden_errors(errors: Iterable[ValueError], kept: Iterable[ValueError]) -> int:
    """Return the number of different errors that `independent` dropped from `errors`."""
    return len({str(error) for error in errors} - {str(error) for error in kept})


def _follows(error: ValueError, earlier: ValueError) -> bool:
    return not isinstance(error, ReadingError) and (_concerns(earlier, error) or _concerns(error, earlier))


def _concerns(error: ValueError, other: ValueError) -> bool:
    """Return whether `other` names the key of `error` or a section that contains this key."""
    if not isinstance(error, RecipeError):
        return False
    if isinstance(other, RecipeError) and f"{error.key}.".startswith(f"{other.key}."):
        return True
    return "." in error.key and _mentions(error.key, str(other))


def _mentions(key: str, text: str) -> bool:
    """Return whether `text` contains the dotted `key` as whole words: `a.b` is in "a.b" and "a.b.c", not in "a.bc" or "x.a.b"."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


@contextlib.contextmanager
def as_recipe_error(key: str, remedy: str, value: Any = _NO_VALUE) -> Iterator[None]:
    """Convert a ValueError of the body to a RecipeError for the setting `key`. A RecipeError passes unchanged."""
    try:
        yield
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(key, str(error), remedy, value=value) from error


@contextlib.contextmanager
def as_input_error() -> Iterator[None]:
    """Convert a ValueError of the body to an InputError. A RecipeError passes unchanged."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def spans_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return increasing numbers as spans, each [first, last] or [only one]: 1, 2, 3, 7 are [[1, 3], [7]]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return spans


def command_name() -> str:
    """Return how messages name megarl's command: as it was started, since `uv tool` and pipx install no module for the user's python."""
    started_as = "megarl" if Path(sys.argv[0]).name == "megarl" else "python -m megarl"
    return os.environ.get(COMMAND, started_as)


def with_kind(error: Exception) -> str:
    """Return the text of `error` after its kind, as commands print it, e.g. "recipe error: ..."."""
    kinds = {RecipeError: "recipe error", InputError: "input error"}
    kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), type(error).__name__)
    return f"{kind}:{error}" if str(error).startswith("\n") else f"{kind}: {error}"


def pluralize(count: int, word: str, plural: str | None = None) -> str:
    """Return the count with its noun: ``1 -> "1 layout"``, ``1200 -> "1,200 layouts"``. `plural` defaults to `word` + s."""
    return f"{count:,} {word if count == 1 else plural or f'{word}s'}"


def cut_end(text: str, longest: int) -> str:
    """Return `text`, or its beginning with an ellipsis if it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def cut_middle(text: str, longest: int) -> str:
    """Return `text`, or its two ends with a note if it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out here …]\n{text[len(text) - half :]}"
