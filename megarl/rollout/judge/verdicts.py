"""Render the judge's prompt and parse its verdict (pure functions of text)."""

from __future__ import annotations

import math
import re

from megarl.types import Prompt

VARIABLES = ("prompt", "response", "ground_truth", "extra_info")
"""Variables of a template: the row's question, the sample's response, and two columns of the row."""


class JudgeTemplate:
    """The Jinja template of `judge.prompt`, in a sandboxed environment.

    Raises ValueError if the template has a syntax error, reads an unknown variable, or never reads the response.
    """

    def __init__(self, template: str):
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            self.reads = meta.find_undeclared_variables(environment.parse(template))
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the template: {error.message}") from error
        unknown = sorted(self.reads - {*VARIABLES, *environment.globals})
        if unknown:
            raise ValueError(f"the template reads {', '.join(unknown)}, but only {', '.join(VARIABLES)} exist")
        if "response" not in self.reads:
            raise ValueError(
                "the template never reads `response`, so every sample of a row would get the same question"
            )
        self._template = environment.from_string(template)

    def render(self, prompt: Prompt, response: str) -> str:
        """Return the question about a sample. Raises ValueError if the row lacks a column that the template reads."""
        try:
            return self._template.render(
                prompt=prompt.question,
                response=response,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
        except Exception as error:  # rows have values of any type
            raise ValueError(f"judge.prompt cannot be rendered: {type(error).__name__}: {error}") from error


def number_in(verdict: str, pattern: re.Pattern[str]) -> float | None:
    """Return the number in the first group of the last match in `verdict`; None without a match or a finite number."""
    matches = list(pattern.finditer(verdict))
    try:
        number = float(matches[-1][1] or "") if matches else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
