"""MATH (Hendrycks et al., 2021) as prompt rows: https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.commands.data.source import PreparedFiles, problem_row, write_splits
from megarl.data.rows import Row
from megarl.rewards.latex_boxed import in_braces

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet and out/test.parquet in verl's columns.

    `source` is a folder with both splits, in columns ``problem``, ``solution`` and optionally ``level`` ("Level 3") and
    ``type``, or a name on the hub. The answer is the content of the solution's last box. `extra_info.level` is the level
    as a number, for a curriculum, or null for "Level ?".

    Raises ValueError as `write_splits`, and for a solution without a box.
    """
    return write_splits(out, source, ("problem", "solution"), _prompt_row, optional=("level", "type"))


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, ``\fbox{...}`` or ``\boxed 3`` of `text`, or None."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*", text)]
    if not starts:
        return None
    if text.startswith("{", starts[-1]):
        return in_braces(text, starts[-1] + 1)
    word = re.match(r"[^\s$]+", text[starts[-1] :])
    return word.group() if word else None


def _prompt_row(row: Row, split: str, index: int) -> dict[str, Any]:
    problem, solution = row.need("problem", str), row.need("solution", str)
    answer = boxed(solution)
    if not answer:
        raise ValueError(f"{row.where}: the solution has no \\boxed answer: ...{solution[-60:]!r}")
    number = re.fullmatch(r"Level (\d+)", row.get("level", str) or "")
    level, subject = int(number.group(1)) if number else None, row.get("type", str)
    content = f"{problem} {INSTRUCTION}"
    return problem_row(
        DATA_SOURCE, content, answer, split, index, level=level, type=subject, question=problem, answer=solution
    )
