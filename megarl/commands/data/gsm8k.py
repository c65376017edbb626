"""GSM8K (Cobbe et al., 2021) as prompt rows: https://github.com/openai/grade-school-math."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.source import problem_row, rows_of
from megarl.data.rows import Row, write_parquet

INSTRUCTION = 'Reason step by step, then end with a line that holds "#### " and the final number alone.'
DATA_SOURCE = "openai/gsm8k"


def prepare(source: str, out: Path) -> dict[Path, int]:
    """Write out/train.parquet and out/test.parquet in verl's columns, and the worked answer as `response` for SFT; returns
    the rows of each.

    `source` is a folder with train and test as .jsonl or .parquet files of ``question`` and
    ``answer``, or the name of a data set on the Hugging Face hub (``openai/gsm8k``).

    Raises:
        ValueError: the source is neither, a file or column is missing, or an answer has no ``####``.
    """
    written = {}
    for split in ("train", "test"):
        found = rows_of(source, split, ("question", "answer"), config="main")
        rows = [_prompt_row(row, split, index) for index, row in enumerate(found)]
        written[Path(out) / f"{split}.parquet"] = rows
    for path, rows in written.items():  # only once both splits are known to be good
        write_parquet(path, rows)
    return {path: len(rows) for path, rows in written.items()}


def _prompt_row(row: Row, split: str, index: int) -> dict[str, Any]:
    question, answer = row.need("question", str), row.need("answer", str)
    _, marker, number = answer.rpartition("####")
    ground_truth = number.strip().replace(",", "")
    if not marker or not ground_truth:
        raise ValueError(f"{row.where}: the answer has no number after '####': ...{answer[-60:]!r}")
    content = f"{question}\n{INSTRUCTION}"
    problem = problem_row(DATA_SOURCE, content, ground_truth, split, index, answer=answer, question=question)
    return problem | {"response": answer}
