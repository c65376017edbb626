"""GSM8K (Cobbe et al., 2021) as prompt rows: https://github.com/openai/grade-school-math."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.source import PreparedFiles, problem_row, write_splits
from megarl.data.rows import Row
from megarl.rewards.gsm8k import final_answer

INSTRUCTION = 'Reason step by step, then end with a line that holds "#### " and the final number alone.'
DATA_SOURCE = "openai/gsm8k"


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet and out/test.parquet in verl's columns.

    The column `response` has the worked answer, for SFT. `source` is a folder with train and test as .jsonl or .parquet
    files with ``question`` and ``answer``, or a name on the Hugging Face hub (``openai/gsm8k``).

    Raises ValueError as `write_splits`, and for an answer without ``####``.
    """
    return write_splits(out, source, ("question", "answer"), _prompt_row, config="main")


def _prompt_row(row: Row, split: str, index: int) -> dict[str, Any]:
    question, answer = row.need("question", str), row.need("answer", str)
    ground_truth = final_answer(answer)
    if "####" not in answer or not ground_truth:
        raise ValueError(f"{row.where}: the answer has no number after '####': ...{answer[-60:]!r}")
    content = f"{question}\n{INSTRUCTION}"
    problem = problem_row(DATA_SOURCE, content, ground_truth, split, index, answer=answer, question=question)
    return problem | {"response": answer}
