"""DeepScaleR (Luo et al., 2025) as prompt rows: https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.math import INSTRUCTION
from megarl.commands.data.source import PreparedFiles, problem_row, rows_of, write_distinct
from megarl.data.rows import Row

DATA_SOURCE = "agentica-org/DeepScaleR-Preview-Dataset"


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet in verl's columns.

    `source` is a file or a folder with the split train, in columns ``problem`` and ``answer``, or a name on the hub.

    Raises ValueError as `rows_of`, and for an empty answer.
    """
    rows, notices = rows_of(source, "train", ("problem", "answer"))
    prompt_rows = (_prompt_row(row, index) for index, row in enumerate(rows))
    return write_distinct(out / "train.parquet", prompt_rows, notices)


def _prompt_row(row: Row, index: int) -> dict[str, Any]:
    problem, answer = row.need("problem", str), row.need("answer", str).strip()
    if not answer:
        raise ValueError(f"{row.where}: the answer is empty")
    return problem_row(DATA_SOURCE, f"{problem} {INSTRUCTION}", answer, "train", index, question=problem)
