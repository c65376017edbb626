"""What a judge is asked, and what its answer is worth: pure functions of text."""

from __future__ import annotations

import math
import re

from megarl.types import Prompt

VARIABLES = ("prompt", "response", "ground_truth", "extra_info")
"""What a template may read: the row's question, the sample's response, and two columns of the row."""


class Question:
    """`judge.prompt`: a Jinja template, in an environment that runs no code of the template's.

    Raises ValueError where it cannot be read, reads what there is not, or never reads the response.
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
            raise ValueError(f"the template reads {', '.join(unknown)}, and there are {', '.join(VARIABLES)}")
        if "response" not in self.reads:
            raise ValueError("the template never reads `response`, so that every sample would be judged alike")
        self._template = environment.from_string(template)

    def ask(self, prompt: Prompt, response: str) -> str:
        """The question about one sample. Raises ValueError where the row lacks what the template reads."""
        try:
            return self._template.render(
                prompt=prompt.question,
                response=response,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
        except Exception as error:  # a template may meet anything in a row
            raise ValueError(f"judge.prompt cannot be rendered: {type(error).__name__}: {error}") from error


def number_in(verdict: str, pattern: re.Pattern[str]) -> float | None:
    """What the first group of the last match in `verdict` says; None: there is no match, or no finite number in it."""
    found = list(pattern.finditer(verdict))
    try:
        number = float(found[-1][1] or "") if found else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def shortened(text: str, longest: int) -> str:
    """`text` in at most `longest` characters and a mark: its beginning and its end, where a verdict has its number."""
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]} [...] {text[head - longest :]}"
