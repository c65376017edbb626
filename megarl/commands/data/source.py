"""Readers of published rows (a file, a folder, or the Hugging Face hub), and writers of prepared rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.data.rows import Row, iterate_rows, write_parquet
from megarl.hf import hub

Prepared = tuple[dict[Path, int], list[str]]
"""Number of rows of each written file, and notices about omitted rows."""


def rows_of(
    source: str, split: str, *layouts: Sequence[str], optional: Sequence[str] = (), config: str | None = None
) -> Iterator[Row]:
    """Iterate over the rows of one split, with the given columns (see `rows.iterate_rows`), a few thousand at a time.

    `source` is one of: a .parquet or .jsonl file with the split; a folder with `split`.jsonl, `split`.parquet or the
    hub's `split`-00000-of-00001.parquet, directly or in its data/; the name of a data set on the hub, with its
    configuration `config`.

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
    content = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    advice = "A data set of one split can also be a file"
    raise ValueError(f"{folder} has neither {split}.jsonl nor {split}.parquet, but {content}. {advice}")


def _from_hub(
    name: str, split: str, layouts: Sequence[Sequence[str]], optional: Sequence[str], config: str | None
) -> Iterator[Row]:
    if (named := hub.model_name(name)) is None:
        raise ValueError(f"source {name!r} is neither a file, nor a folder, nor a hub name like openai/gsm8k")
    files, _ = hub.pin_data(replace(named, path=f"{config}/{split}" if config else split))
    for file in hub.data_files(files):
        yield from iterate_rows(file, *layouts, optional=optional)


def write_distinct(path: Path, rows: Iterable[dict[str, Any]]) -> Prepared:
    """Write the rows (in verl's columns) with distinct prompts to the parquet file `path`.

    Prompts with several answers are omitted, because no score would be right.
    """
    read, distinct, contradicted = 0, dict[str, dict[str, Any]](), set[str]()
    for row in rows:
        read += 1
        prompt = json.dumps(row["prompt"], sort_keys=True)
        first = distinct.setdefault(prompt, row)
        if first["reward_model"]["ground_truth"] != row["reward_model"]["ground_truth"]:
            contradicted.add(prompt)
    kept = [row for prompt, row in distinct.items() if prompt not in contradicted]
    write_parquet(path, kept)
    notices = []
    if repeated := read - len(distinct):
        notices.append(f"{repeated:,} of {read:,} rows were omitted as duplicates")
    if contradicted:
        notices.append(f"{len(contradicted):,} prompts were omitted because they have several answers")
    return {path: len(kept)}, notices


def write_splits(
    out: Path,
    source: str,
    columns: Sequence[str],
    prompt_row: Callable[[Row, str, int], dict[str, Any]],
    *,
    optional: Sequence[str] = (),
    config: str | None = None,
) -> Prepared:
    """Write out/train.parquet and out/test.parquet, after both splits were read.

    `prompt_row`: (row of `source`, split, index) -> row in verl's columns. Other arguments as of `rows_of`.

    Raises:
        ValueError: the source is a single file, which cannot have both splits, or `rows_of` rejects it.
    """
    if Path(source).is_file():
        raise ValueError(f"{source} is one file; name a folder with train and test (.jsonl or .parquet), or a hub name")
    files = {}
    for split in ("train", "test"):
        rows = rows_of(source, split, columns, optional=optional, config=config)
        files[Path(out) / f"{split}.parquet"] = [prompt_row(row, split, index) for index, row in enumerate(rows)]
    for path, content in files.items():
        write_parquet(path, content)
    return {path: len(content) for path, content in files.items()}, []


def problem_row(
    data_source: str, content: str, ground_truth: str, split: str, index: int, **info: Any
) -> dict[str, Any]:
    """Return a mathematical problem in verl's columns. `extra_info` has `split`, `index` and `info`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **info},
    }
