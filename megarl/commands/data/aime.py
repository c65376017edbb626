"""AIME (American Invitational Mathematics Examination): prompt rows for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.commands.data.dapo_math import COLUMNS, verl_row
from megarl.commands.data.source import PreparedFiles, problem_row, rows_of, write_distinct
from megarl.data.rows import Row

# DAPO's prompt. The scorer of math_dapo and aime* reads the answer in this form.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
# Columns of, in order: Maxwell-Jia/AIME_2024; HuggingFaceH4/aime_2024, yentinglin/aime_2025 and math-ai/aime25;
# opencompass/AIME2025; BytedTsinghua-SIA/AIME-2024 (verl's columns).
LAYOUTS = (("Problem", "Answer"), ("problem", "answer"), ("question", "answer"), COLUMNS)


def prepare(
    source: str, out: Path, year: int | None = None, split: str | None = None, config: str | None = None
) -> PreparedFiles:
    """Write out/test.parquet.

    `source` is a file, a folder with `split` (default: train), or a name on the hub (with `split` and `config`). The
    rows' data source is ``aime_YEAR``, or ``aime`` without a year. Rows in verl's columns keep their data source and
    prompt.

    Raises ValueError as `rows_of`, and for an argument that does not apply to the source.
    """
    if split is not None and Path(source).is_file():
        raise ValueError(f"--split {split}: a file has only one split. Omit --split, or name a folder.")
    if config is not None and Path(source).exists():
        raise ValueError(f"--config {config}: only data sets on the hub have configurations. Omit --config.")
    rows, notices = rows_of(source, split or "train", *LAYOUTS, optional=("ability", "extra_info"), config=config)
    return write_distinct(out / "test.parquet", _prompt_rows(rows, year), notices)


def _prompt_rows(rows: Iterable[Row], year: int | None) -> Iterator[dict[str, Any]]:
    name = "aime" if year is None else f"aime_{year}"
    for index, row in enumerate(rows):
        if all(column in row.values for column in COLUMNS):
            if year is not None:
                raise ValueError(
                    f"{row.where}: --year {year}: rows in verl's columns keep their data_source. Omit --year."
                )
            yield verl_row(row, "test", index)
            continue
        problem = next(row.values[column] for column in ("Problem", "problem", "question") if column in row.values)
        answer = row.values.get("Answer", row.values.get("answer"))
        yield problem_row(name, f"{BEFORE}{problem}{AFTER}", _number(row, answer), "test", index, question=problem)


def _number(row: Row, answer: Any) -> str:
    """Return an answer without leading zeros (025 is 25). AIME's answers are integers from 0 to 999."""
    text = str(answer).strip()
    if not text.isascii() or not text.isdigit() or int(text) > 999:
        raise ValueError(f"{row.where}: the answer {answer!r} is not an integer from 0 to 999")
    return str(int(text))
