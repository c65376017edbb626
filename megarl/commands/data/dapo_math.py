"""DAPO-Math-17k (Yu et al., 2025) without duplicates: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.source import PreparedFiles, rows_of, write_distinct
from megarl.data.rows import Row, messages_of

COLUMNS = ("data_source", "prompt", "reward_model")
FILE = "dapo-math-17k"  # in the folder data/ on the hub


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet.

    `source` is the published file (``dapo-math-17k.parquet``), a folder with it or with its ``data/``, or a name on the
    hub. The rows already have verl's columns, and prompts that ask for the answer in the scorer's form, so both are kept.
    The published file has each row about 100 times.

    Raises ValueError as `rows_of`.
    """
    named = [place / f"{FILE}.parquet" for place in (Path(source), Path(source) / "data")]
    file = next((str(path) for path in named if path.is_file()), source)
    rows, notices = rows_of(file, "train", COLUMNS, optional=("ability", "extra_info"))
    prompt_rows = (verl_row(row, "train", index) for index, row in enumerate(rows))
    return write_distinct(out / "train.parquet", prompt_rows, notices)


def verl_row(row: Row, split: str, index: int) -> dict[str, Any]:
    """Complete a row that has verl's required columns. An existing `extra_info.index` is kept."""
    truth = row.need("reward_model", dict).get("ground_truth")
    if truth is None:
        raise ValueError(f"{row.where}: reward_model has no ground_truth")
    index = (row.get("extra_info", dict) or {}).get("index", index)
    return {
        "data_source": row.need("data_source", str),
        "prompt": messages_of(row, "prompt"),
        "ability": (row.get("ability", str) or "math").lower(),
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"split": split, "index": index},
    }
