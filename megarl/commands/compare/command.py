"""Entry point of ``python -m megarl compare A B``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megarl.atomic_files import check_target
from megarl.commands.compare.logs import read_log
from megarl.commands.compare.rules import CompareOptions, compare_logs
from megarl.observe.json_lines import strict


def compare(run_a: Path, run_b: Path, options: CompareOptions, *, html: Path | None, as_json: bool) -> bool:
    """Print the comparison of A with B, write the page to `html`, and return True if A is within the rules.

    Raises ValueError if a log or an option cannot be used.
    """
    if html is not None:
        check_target("--html", html)
    result = compare_logs(read_log(run_a), read_log(run_b), options)
    if html is not None:
        from megarl.commands.compare.show import render
        from megarl.observe.html import write_html

        write_html(html, render(result))
    if as_json:
        print(json.dumps(strict(result.as_json()), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        from rich.console import Console

        from megarl.commands.compare.show import show

        show(result, Console())
        if html is not None:
            print(html)
    return result.within


def percentage(text: str) -> float:
    """Parse a percentage: ``"4"`` and ``"4%"`` are 0.04. Raises ValueError for negative numbers and other text."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", text)
    if not number:
        raise ValueError(f"--max-error {text}: give a percentage, 4 or 4% for a mean absolute error of 0.04")
    return float(number[1]) / 100


def step_range(text: str) -> tuple[int | None, int | None]:
    """Parse a range of steps: ``"5:40"`` is (5, 40), ``"5:"`` (5, None), ``":40"`` (None, 40). Raises ValueError."""
    parts = re.fullmatch(r"(\d*):(\d*)", text.strip())
    if not parts:
        raise ValueError(f"--steps {text}: give FROM:TO, both included, as in 1:100, 1: or :100")
    first, last = (int(part) if part else None for part in parts.groups())
    if first is not None and last is not None and first > last:
        raise ValueError(f"--steps {text}: {first} is greater than {last}")
    return first, last
