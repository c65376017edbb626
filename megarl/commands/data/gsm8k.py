"""GSM8K (Cobbe et al., 2021) as prompt rows: https://github.com/openai/grade-school-math."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.source import problem_row, rows_of, write_splits
from megarl.data.rows import Row

INSTRUCTION = 'Reason step by step, then end with a line that holds "#### " and the final number alone.'
DATA_SOURCE = "openai/gsm8k"


def prepare(source: str, out: Path) -> dict[Path, int]:
    """Write out/train.parquet and out/test.parquet in verl's columns. Return the number of rows of each file.

    The column `response` has the worked answer, for SFT. `source` is a folder with train and test as .jsonl or .parquet
    files with ``question`` and ``answer``, or a name on the Hugging Face hub (``openai/gsm8k``).

    Raises:
        ValueError: the source is none of these, a file or column is missing, or an answer has no ``####``.
    """

    def rows(split: str) -> list[dict[str, Any]]:
        source_rows = rows_of(source, split, ("question", "answer"), config="main")
        return [_prompt_row(row, split, index) for index, row in enumerate(source_rows)]

    return write_splits(out, rows)


def _prompt_row(row: Row, split: str, index: int) -> dict[str, Any]:
    question, answer = row.need("question", str), row.need("answer", str)
    _, marker, number = answer.rpartition("####")
    ground_truth = number.strip().replace(",", "")
    if not marker or not ground_truth:
        raise ValueError(f"{row.where}: the answer has no number after '####': ...{answer[-60:]!r}")
    content = f"{question}\n{INSTRUCTION}"
    problem = problem_row(DATA_SOURCE, content, ground_truth, split, index, answer=answer, question=question)
    return problem | {"response": answer}
