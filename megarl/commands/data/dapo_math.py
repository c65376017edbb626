"""DAPO-Math-17k (Yu et al., 2025) without its repetitions: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.commands.data.source import Distinct, rows_of
from megarl.data.rows import Row, messages_of, write_parquet

COLUMNS = ("data_source", "prompt", "reward_model")
FILE = "dapo-math-17k"  # as the hub calls it, in data/


def prepare(source: str, out: Path) -> tuple[dict[Path, int], list[str]]:
    """Write out/train.parquet; returns its rows, and what was left out, in words.

    `source` is the published file (``dapo-math-17k.parquet``), a folder that holds it or its ``data/``, or a hub name. Rows
    are in verl's columns already, and their prompts ask for the answer in the form that the scorer reads: they stay as
    they are. The published file has each row about 100 times.

    Raises:
        ValueError: the source is neither, or a file or column is missing.
    """
    distinct = Distinct()
    named = [place / f"{FILE}.parquet" for place in (Path(source), Path(source) / "data")]
    file = next((str(path) for path in named if path.is_file()), source)
    for index, row in enumerate(rows_of(file, "train", COLUMNS, optional=("ability", "extra_info"))):
        distinct.add(verl_row(row, "train", index))
    path = Path(out) / "train.parquet"
    rows = distinct.rows()
    write_parquet(path, rows)
    return {path: len(rows)}, distinct.notices()


def verl_row(row: Row, split: str, index: int) -> dict[str, Any]:
    """A row that has verl's columns, with every one of them. Its `extra_info.index` stays where it has one."""
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
