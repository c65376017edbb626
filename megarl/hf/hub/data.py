"""Data sets on the hub."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.hf.hub.errors import hub_errors, not_in_cache
from megarl.hf.hub.files import (
    cached_snapshot,
    cached_tree,
    files_in,
    is_in_cache,
    listing,
    name_of_snapshot,
    snapshot,
)
from megarl.hf.hub.names import HubError, HubName, data_name, is_file
from megarl.hf.hub.splits import CONVERTED, check_one_form, files_of_split, lacks_shards


def pin_data(name: HubName) -> tuple[list[HubName], str | None]:
    """Return the files of a data set's split, each at a commit, and a notice as `pin_model` does. Fetches no rows.

    The split's files are the ones in the README's `configs`, else files named after the split, else the parquet files
    that the hub has converted the data set to. Raises HubError, also if the hub gives no answer and the cache has a part.
    """
    with hub_errors(name, "dataset"):
        listed = listing(name, "dataset")
        has_readme = "README.md" in listed.files and not is_file(name.path)
        readme = _text(replace(listed.name, path="README.md")) if has_readme else ""
        chosen, has = files_of_split(name.path, listed.files, readme)
        if not chosen and name.revision is None and not is_file(name.path):
            converted = replace(name, revision=CONVERTED)
            with contextlib.suppress(HubError), hub_errors(converted, "dataset"):
                listed = listing(converted, "dataset")
                chosen, splits = files_of_split(name.path, listed.files, "")
                name, has = converted, has or splits
        if not chosen:
            raise no_rows(name, has, listed.files)
        check_one_form(name, chosen)
        if not listed.is_whole and lacks_shards(name.path, chosen):
            raise not_in_cache(None, name, "data set")
        return [replace(listed.name, path=file) for file in chosen], listed.notice


def data_files(names: Sequence[HubName]) -> list[Path]:
    """Return files of one data set at one commit in this machine's cache; missing ones are downloaded. Raises HubError."""
    with hub_errors(names[0], "dataset"):
        folder = snapshot(names[0], "dataset", [glob.escape(name.path) for name in names])
        return [folder / name.path for name in names]


def cached_files(item: str) -> list[str]:
    """Return the cached files of an item of `data.train_files`, without any connection; [] if there are none."""
    try:
        name = data_name(item)
    except HubError:
        return []
    if name is None:
        return []
    may_be_converted = name.revision is None and not is_file(name.path)
    for revision in (None, CONVERTED) if may_be_converted else (name.revision,):
        folder = cached_snapshot(replace(name, revision=revision), "dataset")
        if folder is not None:
            readme = folder / "README.md"
            text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
            tree = cached_tree(folder)
            files, _ = files_of_split(name.path, files_in(folder) if tree is None else tree, text)
            is_whole = tree is not None or not lacks_shards(name.path, files)
            if files and is_whole and all((folder / file).is_file() for file in files):
                return [str(folder / file) for file in files]
    return []


def name_of_file(path: str) -> HubName | None:
    """Return the hub name, with its commit, of a data set's file in this machine's cache; None for any other file."""
    return name_of_snapshot(Path(path), "dataset") if is_in_cache(Path(path)) else None


def no_rows(name: HubName, splits: Sequence[str], files: Sequence[str]) -> HubError:
    """Return the error of a data set without the rows `name.path`. `splits`, `files`: what the repository has."""
    rows = sorted(file for file in files if is_file(file))
    shown = (splits or rows)[:8]
    remedy = (
        f"name one of {', '.join(f'hf://{name.repo}/{path}' for path in shown)}"
        if shown
        else (
            "it has neither splits that the hub has converted to parquet nor .parquet or .jsonl files: convert its rows "
            "(docs/data.md)"
        )
    )
    return HubError(f"{name.repo} has no rows {name.path!r}", remedy)


def _text(name: HubName) -> str:
    return data_files([name])[0].read_text(encoding="utf-8", errors="replace")
