"""Readers of published rows (a file, a folder, or the Hugging Face hub), and writers of prepared rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.data.rows import Row, iterate_rows, write_parquet
from megarl.errors import pluralize
from megarl.hf import hub
from megarl.hf.hub.splits import files_of_split, lacks_shards, several_forms

_SHOWN = 8  # files of a folder in a message


class PreparedFiles(NamedTuple):
    """Number of rows of each written file, and notices about omitted rows and about the source."""

    rows: dict[Path, int]
    notices: list[str]


def rows_of(
    source: str, split: str, *layouts: Sequence[str], optional: Sequence[str] = (), config: str | None = None
) -> tuple[Iterator[Row], list[str]]:
    """Return the rows of one split, with the given columns (see `iterate_rows`), and notices about the source.

    `source` is one of: a .parquet or .jsonl file with the split; a folder with `split`.jsonl, `split`.parquet or all of
    `split`-00000-of-00002.parquet, ..., directly, in data/ or in a folder per configuration, as on the hub; the name of a
    data set on the hub. `config`: the configuration to read; a folder without it may have the split directly or in data/.

    Raises ValueError, some of it while the rows are read: the source is none of these, has only a part of the split, has it
    twice or without rows, or a file or column is missing.
    """
    path, notices = Path(source), list[str]()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _files_in(path, split, config)
    else:
        files, notices = _files_on_hub(source, split, config)
    return _rows_in(source, split, files, layouts, optional), notices


def _rows_in(
    source: str, split: str, files: Sequence[Path], layouts: Sequence[Sequence[str]], optional: Sequence[str]
) -> Iterator[Row]:
    is_empty = True
    for file in files:
        for row in iterate_rows(file, *layouts, optional=optional):
            is_empty = False
            yield row
    if is_empty:
        raise ValueError(f"{source}{'' if Path(source).is_file() else f': {split}'} has no rows")


def _files_in(folder: Path, split: str, config: str | None) -> list[Path]:
    """Return the files of a split in a folder with file names as on the hub."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    files, splits = files_of_split(f"{config}/{split}" if config else split, names, text)
    if not files:
        files, splits = files_of_split(split, names, text)
    if not files:
        if configurations := [name.removesuffix(f"/{split}") for name in splits if name.endswith(f"/{split}")]:
            listed = ", ".join(configurations)
            raise ValueError(
                f"{folder} has {split} in several configurations: {listed}. Name one of these folders as --source."
            )
        has = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ValueError(
            f"{folder} and {folder / 'data'} have no {split}.jsonl, {split}.parquet or {split}-00000-of-*.parquet (they have: "
            f"{has or 'nothing'}). Rename the file; a command for one split also takes a file as --source."
        )
    if several_forms(files):
        raise ValueError(f"{folder} has {split} in several forms: {', '.join(files)}. Keep one of them in the folder.")
    if lacks_shards(split, files):
        raise ValueError(f"{folder} has only a part of {split}: {', '.join(files)}. Add the other files.")
    return [folder / file for file in files]


def _files_on_hub(source: str, split: str, config: str | None) -> tuple[list[Path], list[str]]:
    """Return the files of a split of a data set on the hub, downloaded, and a notice if they are of a cached commit."""
    try:
        name = hub.model_name(source)  # names of data sets have the same form
    except hub.HubError as error:
        raise ValueError(
            f"source {source!r} does not name a data set on the hub. Write hf://OWNER/NAME or hf://OWNER/NAME@REVISION: the "
            "command chooses the split."
        ) from error
    if name is None:
        raise ValueError(f"source {source!r} is neither a file, nor a folder, nor a hub name like openai/gsm8k")
    files, notice = hub.pin_data(replace(name, path=f"{config}/{split}" if config else split))
    return hub.data_files(files), [] if notice is None else [notice]


def write_distinct(path: Path, rows: Iterable[dict[str, Any]], notices: Sequence[str] = ()) -> PreparedFiles:
    """Write the rows (in verl's columns) with distinct prompts to the parquet file `path`.

    Prompts with several answers are omitted, because no score would be right. `notices`: about the source.

    Raises ValueError if no row is left.
    """
    distinct, counts, contradicted = dict[str, dict[str, Any]](), Counter[str](), set[str]()
    for row in rows:
        prompt = json.dumps(row["prompt"], sort_keys=True)
        counts[prompt] += 1
        first = distinct.setdefault(prompt, row)
        if first["reward_model"]["ground_truth"] != row["reward_model"]["ground_truth"]:
            contradicted.add(prompt)
    kept = [row for prompt, row in distinct.items() if prompt not in contradicted]
    if not kept:
        raise ValueError(f"{path}: every prompt has several answers, so no row is left. Name another --source.")
    write_parquet(path, kept)
    read, of_contradicted = counts.total(), sum(counts[prompt] for prompt in contradicted)
    notices = [*notices]
    if repeated := read - of_contradicted - len(kept):
        notices.append(f"omitted as duplicates: {repeated:,} of {pluralize(read, 'row')}")
    if contradicted:
        notices.append(
            f"omitted because their prompts have several answers: {of_contradicted:,} of {pluralize(read, 'row')} "
            f"({pluralize(len(contradicted), 'prompt')})"
        )
    return PreparedFiles({path: len(kept)}, notices)


def write_splits(
    out: Path,
    source: str,
    columns: Sequence[str],
    prompt_row: Callable[[Row, str, int], dict[str, Any]],
    *,
    optional: Sequence[str] = (),
    config: str | None = None,
) -> PreparedFiles:
    """Write out/train.parquet and out/test.parquet, after both splits were read.

    `prompt_row`: (row of `source`, split, index) -> row in verl's columns. `columns`: required columns. `source`,
    `optional`, `config`: see `rows_of`.

    Raises:
        ValueError: the source is a single file, which cannot have both splits, or `rows_of` rejects it.
    """
    if Path(source).is_file():
        raise ValueError(f"{source} is one file; name a folder with train and test (.jsonl or .parquet), or a hub name")
    files, notices = {}, dict[str, None]()  # each notice once
    for split in ("train", "test"):
        rows, of_source = rows_of(source, split, columns, optional=optional, config=config)
        files[out / f"{split}.parquet"] = [prompt_row(row, split, index) for index, row in enumerate(rows)]
        notices |= dict.fromkeys(of_source)
    for path, content in files.items():
        write_parquet(path, content)
    return PreparedFiles({path: len(content) for path, content in files.items()}, [*notices])


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
