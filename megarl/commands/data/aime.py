"""Problems of AIME, the American Invitational Mathematics Examination, as held-out prompt rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.commands.data.dapo_math import COLUMNS, verl_row
from megarl.commands.data.source import Distinct, problem_row, rows_of
from megarl.data.rows import Row, write_parquet

# DAPO's words, which ask for what the scorer of math_dapo and aime* reads.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
# Columns of Maxwell-Jia/AIME_2024; of HuggingFaceH4/aime_2024, yentinglin/aime_2025 and math-ai/aime25; of
# opencompass/AIME2025; and of BytedTsinghua-SIA/AIME-2024, which are verl's.
LAYOUTS = (("Problem", "Answer"), ("problem", "answer"), ("question", "answer"), COLUMNS)


def prepare(
    source: str, out: Path, year: int | None = None, split: str = "train", config: str | None = None
) -> tuple[dict[Path, int], list[str]]:
    """Write out/test.parquet; returns its rows, and what was left out, in words.

    `source` is a file, a folder with `split`, or a hub name (of which `split` and `config` are taken). The data source
    of the rows is ``aime_YEAR`` (``aime`` without one); rows in verl's columns keep theirs, and their prompts.

    Raises:
        ValueError: the source is neither, or a file or column is missing.
    """
    name = "aime" if year is None else f"aime_{year}"
    distinct = Distinct()
    for row in _rows(source, name, split, config):
        distinct.add(row)
    path = Path(out) / "test.parquet"
    rows = distinct.rows()
    write_parquet(path, rows)
    return {path: len(rows)}, distinct.notices()


def _rows(source: str, name: str, split: str, config: str | None) -> Iterator[dict[str, Any]]:
    optional = ("ability", "extra_info")
    for index, row in enumerate(rows_of(source, split, *LAYOUTS, optional=optional, config=config)):
        if all(column in row.values for column in COLUMNS):
            yield verl_row(row, "test", index)
            continue
        problem = next(row.values[column] for column in ("Problem", "problem", "question") if column in row.values)
        answer = row.values.get("Answer", row.values.get("answer"))
        yield problem_row(name, f"{BEFORE}{problem}{AFTER}", _number(row, answer), "test", index, question=problem)


def _number(row: Row, answer: Any) -> str:
    """An answer of AIME is a whole number from 0 to 999, which some write as 025."""
    text = str(answer).strip()
    if not text.isascii() or not text.isdigit() or int(text) > 999:
        raise ValueError(f"{row.where}: the answer {answer!r} is not a whole number from 0 to 999, as AIME's are")
    return str(int(text))
