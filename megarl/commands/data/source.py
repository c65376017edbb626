"""Where published rows are read from: a file, a folder of files, or the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.data.rows import Row, iterate_rows

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def rows_of(
    source: str, split: str, *layouts: Sequence[str], optional: Sequence[str] = (), config: str | None = None
) -> Iterator[Row]:
    """The rows of one split, with the columns named (see `rows.iterate_rows`), a few thousand in memory at a time.

    `source` is a .parquet or .jsonl file, which then is the split; a folder with `split`.jsonl or `split`.parquet, or as
    the hub keeps it, `split`-00000-of-00001.parquet, there or in its data/; or the name of a data set on the hub, whose
    configuration `config` is taken.

    Raises:
        ValueError: the source is none of these, or a file or column is missing.
    """
    path = Path(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _split_files(path, split)
    else:
        yield from _from_hub(source, split, layouts, optional, config)
        return
    for file in files:
        rows = iterate_rows(file, *layouts, optional=optional)
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{file}: the file has no rows")
        yield first
        yield from rows


def _split_files(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / "data"):
        for name in (f"{split}.jsonl", f"{split}.parquet"):
            if (place / name).is_file():
                return [place / name]
        if parts := sorted(place.glob(f"{split}-*-of-*.parquet")):
            return parts
    there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} has neither {split}.jsonl nor {split}.parquet, but {there}. Or name the file itself")


def _from_hub(
    name: str, split: str, layouts: Sequence[Sequence[str]], optional: Sequence[str], config: str | None
) -> Iterator[Row]:
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"source {name!r} is neither a file, nor a folder, nor a hub name like openai/gsm8k")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"there is no folder {name!r}; to take it from the Hugging Face hub, first: pip install datasets"
        ) from error
    found = load_dataset(name, config, split=split)
    there = list(found.column_names)
    if not any(set(layout) <= set(there) for layout in layouts):
        wanted = ", or ".join(" and ".join(layout) for layout in layouts)
        raise ValueError(f"{name} {split} has the columns {', '.join(there)}, not {wanted}")
    wanted_columns = {*optional, *(column for layout in layouts for column in layout)}
    for number, values in enumerate(found.select_columns([column for column in there if column in wanted_columns])):
        yield Row(f"{name} {split}, row {number}", values)


class Distinct:
    """Rows without those that say the same again.

    Attributes:
        read: rows that were seen.
        contradicted: prompts that came with several answers. They are left out: no score would be right for them.
    """

    def __init__(self) -> None:
        self.read = 0
        self._rows: dict[str, dict[str, Any]] = {}
        self._contradicted: set[str] = set()

    def add(self, row: dict[str, Any]) -> None:
        """A row in verl's columns."""
        self.read += 1
        prompt = json.dumps(row["prompt"], sort_keys=True)
        first = self._rows.setdefault(prompt, row)
        if first["reward_model"]["ground_truth"] != row["reward_model"]["ground_truth"]:
            self._contradicted.add(prompt)

    @property
    def contradicted(self) -> int:
        return len(self._contradicted)

    def rows(self) -> list[dict[str, Any]]:
        """In the order in which they were first seen."""
        return [row for prompt, row in self._rows.items() if prompt not in self._contradicted]

    def notices(self) -> list[str]:
        """What was left out, for people."""
        said = []
        if repeated := self.read - len(self._rows):
            said.append(f"{self.read:,} rows read, of which {repeated:,} repeat another one and were left out")
        if self._contradicted:
            said.append(f"{self.contradicted:,} prompts come with several answers, and were left out")
        return said


def problem_row(
    data_source: str, content: str, ground_truth: str, split: str, index: int, **info: Any
) -> dict[str, Any]:
    """A mathematical problem in verl's columns; `info` joins `split` and `index` in `extra_info`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **info},
    }
