"""Findings about a recipe, collected over the stages of a survey."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer
from megarl.errors import NotHereError, all_of, hidden_errors, independent, raise_all
from megarl.preflight.data import Prepared
from megarl.preflight.models import Config
from megarl.recipe.schema import Recipe

STAGES = {
    "settings": "names of engines, their arguments, megatron.extra, the recipe's own functions",
    "model": "config.json, weight files, tokenizer and layout of the policy; also of critic and teacher",
    "data": "every row, tokenized; tools",
    "rewards": "scorers, prepared; the judge and its question",
}
"""The stages of a survey in order, and the inputs of each stage."""
Severity = Literal["error", "unavailable", "notice"]


@dataclass(frozen=True)
class RecipeFinding:
    """A result of a check.

    `severity`: an `error` ends `train`; `unavailable` is a check that cannot run on this machine; a `notice` informs.
    `error`: the exception of an error; a RecipeError has the key, the problem and the remedy. `key`: the setting to show if
    the error has no key. `text`: the message of the other severities.
    """

    stage: str
    severity: Severity
    error: ValueError | None = None
    key: str = ""
    text: str = ""


@dataclass(frozen=True)
class Available:
    """Files and devices that a survey may use. By default (`train`, `eval`) everything must be on this machine.

    `training`: False for `eval`. `run`: also check the device and the run's directory. `recipe_file`: if set, models and
    data may be missing on this machine; published models (`# Shape:` in this file) replace missing models, `ROWS` rows of
    each file are read, and MCP servers are not started. `shape`: the published model, or the folder, to use as the policy.
    """

    training: bool = True
    run: bool = False
    recipe_file: Path | None = None
    shape: str | None = None


class Survey:
    """The findings about a recipe, and the files that its checks have read.

    `configs`: each readable config.json, by the setting of its model. `rows`: the sampled rows (only with `recipe_file`).
    `prepared`: tokenizer and data; None until they are read without an error. `stages`: names of the completed stages.
    """

    def __init__(self, recipe: Recipe, available: Available | None = None):
        self.recipe, self.available = recipe, available or Available()
        self.configs: dict[str, Config] = {}
        self.rows: list[Row] = []
        self.tokenizer: Tokenizer | None = None
        self.prepared: Prepared | None = None
        self.stages: list[str] = []
        self._stage = next(iter(STAGES))
        self._findings: list[RecipeFinding] = []

    @property
    def errors(self) -> list[ValueError]:
        """The independent errors; see `megarl.errors.independent`."""
        return independent(finding.error for finding in self._findings if finding.error is not None)

    @property
    def hidden(self) -> int:
        """Number of errors that may follow from `errors` and are not among them."""
        every = [finding.error for finding in self._findings if finding.error is not None]
        return hidden_errors(every, self.errors)

    def texts(self, severity: Severity) -> list[str]:
        """Return the messages of the findings of a `severity` other than error."""
        return [finding.text for finding in self._findings if finding.severity == severity]

    def errors_in(self, stage: str) -> list[ValueError]:
        """Return the independent errors of a stage."""
        stages = {id(finding.error): finding.stage for finding in self._findings if finding.error is not None}
        return [error for error in self.errors if stages[id(error)] == stage]

    def key_of(self, error: ValueError) -> str:
        """Return the setting to show for an `error` that has no key."""
        return next(finding.key for finding in self._findings if finding.error is error)

    def raise_errors(self) -> None:
        """Raise all errors found so far together."""
        raise_all(finding.error for finding in self._findings if finding.error is not None)

    # --- collecting --------------------------------------------------------------------------------------------------

    def run_stage(self, name: str, checks: Callable[[Survey], None], *, whole: bool = True) -> None:
        """Run the checks of the stage `name`. `whole`: False if the stage has other checks as well."""
        self._stage = name
        if whole:
            self.stages.append(name)
        checks(self)

    @contextlib.contextmanager
    def part(self, key: str, *, needed: bool = False) -> Iterator[None]:
        """Record the errors that the body raises; the survey continues.

        `key`: the setting to show if the error has no key. `needed`: report a NotHereError as an error, not as unavailable.
        """
        try:
            yield
        except ValueError as error:
            self.add(all_of(error), key, needed=needed)

    def add(self, errors: Iterable[ValueError], key: str, *, needed: bool = False) -> None:
        for error in errors:
            if isinstance(error, NotHereError) and self.is_partial and not needed:
                self.unavailable(f"{error.key}: {one_line(error.problem)}. To do: {one_line(error.remedy)}")
            else:
                self._findings.append(RecipeFinding(self._stage, "error", error=error, key=key))

    def unavailable(self, text: str) -> None:
        self._findings.append(RecipeFinding(self._stage, "unavailable", text=text))

    def notice(self, text: str) -> None:
        self._findings.append(RecipeFinding(self._stage, "notice", text=text))

    @property
    def is_partial(self) -> bool:
        """Return whether models and data may be missing on this machine."""
        return self.available.recipe_file is not None


def one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
