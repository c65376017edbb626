"""Data sets on the hub."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.hf.hub.errors import hub_errors
from megarl.hf.hub.files import cached_snapshot, files_in, is_in_cache, listing, name_of_snapshot, snapshot
from megarl.hf.hub.names import HubError, HubName, data_name, is_file
from megarl.hf.hub.splits import CONVERTED, files_of_split


def pin_data(name: HubName, *, download: bool = True) -> tuple[list[HubName], str | None]:
    """Return the files of a data set's split, each at a commit and in the cache, and a notice as `pin_model` does.

    The split's files are the ones in the README's `configs`, else files named after the split, else the parquet files
    that the hub has converted the data set to. Without `download` the files keep the revision of `name`. Raises HubError.
    """
    with hub_errors(name, "dataset"):
        files, notice = listing(name, "dataset")
        readme = _text(name, "README.md") if "README.md" in files else ""
        chosen, has = files_of_split(name.path, files, readme)
        if not chosen and not name.is_pinned and name.revision is None and not is_file(name.path):
            converted = replace(name, revision=CONVERTED)
            with contextlib.suppress(HubError), hub_errors(converted, "dataset"):
                files, notice = listing(converted, "dataset")
                chosen, splits = files_of_split(name.path, files, "")
                name, has = converted, has or splits
        if not chosen:
            raise HubError(f"{name.repo} has no rows {name.path!r}", _name_one_of(name, has, files))
        if not download:
            return [replace(name, path=file) for file in chosen], notice
        commit = snapshot(name, "dataset", [glob.escape(file) for file in chosen]).name
        return [HubName(name.repo, commit, file) for file in chosen], notice


def data_file(name: HubName) -> Path:
    """Return a file of a data set at a commit in this machine's cache, downloaded if it is missing. Raises HubError."""
    with hub_errors(name, "dataset"):
        return snapshot(name, "dataset", [glob.escape(name.path)]) / name.path


def cached_files(item: str) -> list[str]:
    """Return the files in the cache of an item of `data.train_files`, without any connection; [] if it has none there."""
    try:
        name = data_name(item)
    except HubError:
        return []
    if name is None:
        return []
    for revision in (name.revision, CONVERTED):
        folder = cached_snapshot(replace(name, revision=revision), "dataset")
        if folder is not None:
            readme = folder / "README.md"
            text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
            if files := files_of_split(name.path, files_in(folder), text)[0]:
                return [str(folder / file) for file in files]
    return []


def name_of_file(path: str) -> HubName | None:
    """Return the hub name, with its commit, of a data set's file in this machine's cache; None for any other file."""
    return name_of_snapshot(Path(path), "dataset") if is_in_cache(Path(path)) else None


def _name_one_of(name: HubName, splits: Sequence[str], files: Sequence[str]) -> str:
    rows = sorted(file for file in files if is_file(file))
    shown = (splits or rows)[:8]
    return (
        f"name one of {', '.join(f'hf://{name.repo}/{path}' for path in shown)}"
        if shown
        else (
            "it has neither splits that the hub has converted to parquet nor .parquet or .jsonl files: convert its rows "
            "(docs/data.md)"
        )
    )


def _text(name: HubName, file: str) -> str:
    return (snapshot(name, "dataset", [file]) / file).read_text(encoding="utf-8", errors="replace")
