"""GSM8K (Cobbe et al., 2021) as prompt rows: https://github.com/openai/grade-school-math."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.data.rows import Row, read_rows, write_parquet

INSTRUCTION = 'Reason step by step, then end with a line that holds "#### " and the final number alone.'
DATA_SOURCE = "openai/gsm8k"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare(source: str, out: Path) -> dict[Path, int]:
    """Write out/train.parquet and out/test.parquet in verl's columns; returns the rows of each.

    `source` is a folder with train and test as .jsonl or .parquet files of ``question`` and
    ``answer``, or the name of a data set on the Hugging Face hub (``openai/gsm8k``).

    Raises:
        ValueError: the source is neither, a file or column is missing, or an answer has no ``####``.
    """
    written = {}
    for split in ("train", "test"):
        rows = [_prompt_row(row, split, index) for index, row in enumerate(_questions(source, split))]
        written[Path(out) / f"{split}.parquet"] = rows
    for path, rows in written.items():  # only once both splits are known to be good
        write_parquet(path, rows)
    return {path: len(rows) for path, rows in written.items()}


def _questions(source: str, split: str) -> list[Row]:
    folder = Path(source)
    if not folder.is_dir():
        return _from_hub(source, split)
    for suffix in ("jsonl", "parquet"):
        if (folder / f"{split}.{suffix}").is_file():
            return read_rows([folder / f"{split}.{suffix}"], ("question", "answer"))
    there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} has neither {split}.jsonl nor {split}.parquet, but {there}")


def _from_hub(name: str, split: str) -> list[Row]:
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"source {name!r} is neither a folder nor a hub name like openai/gsm8k")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"there is no folder {name!r}; to take it from the Hugging Face hub, first: pip install datasets"
        ) from error
    return [Row(f"{name} {split}, row {i}", row) for i, row in enumerate(load_dataset(name, "main", split=split))]


def _prompt_row(row: Row, split: str, index: int) -> dict[str, Any]:
    question, answer = row.need("question", str), row.need("answer", str)
    _, marker, number = answer.rpartition("####")
    ground_truth = number.strip().replace(",", "")
    if not marker or not ground_truth:
        raise ValueError(f"{row.where}: the answer has no number after '####': ...{answer[-60:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
