"""Files of a split of a data set on the hub, by the repository's file names and its README. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

CONVERTED = "refs/convert/parquet"
"""Branch with the parquet files that the hub converts a public data set to: CONFIG/SPLIT/0000.parquet."""

_SUFFIXES = (".parquet", ".jsonl")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"(?:(?P<folder>.+)/)?(?P<split>[A-Za-z]\w*)(?:-\d{5}-of-\d{5})?\.(?:parquet|jsonl)")
_CONVERTED_FILE = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d{4,}\.parquet")


def files_of_split(path: str, files: Sequence[str], readme: str) -> tuple[list[str], list[str]]:
    """Return the files of `path` and the paths that `files` offer: (files, ["CONFIG/SPLIT", ...]).

    `path`: `CONFIG/SPLIT`, `SPLIT`, or a file, in which * matches any characters. `files`: all files of the repository.
    `readme`: text of README.md, whose `configs` may name the files of each split. No files: there is no such split, or it
    is in several configurations.
    """
    rows = sorted(file for file in files if file.endswith(_SUFFIXES))
    splits = _from_readme(readme, rows) or _from_names(rows)
    if path.endswith(_SUFFIXES):
        return [file for file in rows if fnmatchcase(file, path)], [*splits]
    matches = [name for name in splits if path in (name, name.split("/", 1)[-1])]
    default = [name for name in matches if name == f"default/{path}"]
    chosen = [path] if path in splits else default or matches
    return (splits[chosen[0]] if len(chosen) == 1 else []), [*splits]


def _from_readme(readme: str, rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each "CONFIG/SPLIT" that the README's metadata names and that are .parquet or .jsonl."""
    match = _FRONT_MATTER.match(readme)
    if match is None:
        return {}
    try:
        metadata = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}
    splits: dict[str, list[str]] = {}
    for config in metadata.get("configs") or [] if isinstance(metadata, dict) else []:
        if not isinstance(config, dict) or not isinstance(config.get("data_files"), list):
            continue
        for part in config["data_files"]:
            if isinstance(part, dict) and "split" in part and "path" in part:
                patterns = [str(pattern) for pattern in _as_list(part["path"])]
                named = [file for file in rows if any(_matches(file, pattern) for pattern in patterns)]
                if named:
                    splits[f"{config.get('config_name', 'default')}/{part['split']}"] = named
    return splits


def _from_names(rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by their names: train.jsonl, data/train-00000-of-00002.parquet, main/train/0000.parquet.

    The configuration is the files' folder, `default` at the top and in `data`.
    """
    splits: dict[str, list[str]] = {}
    for file in rows:
        if match := _CONVERTED_FILE.fullmatch(file):
            config = match["config"]
        elif match := _NAMED.fullmatch(file):
            config = "default" if match["folder"] in (None, "data") else match["folder"].removeprefix("data/")
            if "/" in config:
                continue
        else:
            continue
        splits.setdefault(f"{config}/{match['split']}", []).append(file)
    return splits


def _matches(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern.removeprefix("./").replace("**", "*"))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
