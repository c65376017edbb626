"""Files of a split of a data set on the hub, by the repository's file names and its README. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import yaml

from megarl.hf.hub.names import HubError, HubName

CONVERTED = "refs/convert/parquet"
"""Branch with the parquet files that the hub converts a public data set to: CONFIG/SPLIT/0000.parquet."""

_SUFFIXES = (".parquet", ".jsonl")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"(?:(?P<folder>.+)/)?(?P<split>[A-Za-z]\w*)(?:-\d{5}-of-\d{5})?\.(?:parquet|jsonl)")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")
_CONVERTED_FILE = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d{4,}\.parquet")


def files_of_split(path: str, files: Sequence[str], readme: str) -> tuple[list[str], list[str]]:
    """Return the files of `path` and the paths that `files` offer: (files, ["CONFIG/SPLIT", ...]).

    `path`: `CONFIG/SPLIT`, `SPLIT`, or a file, in which * matches any characters. `files`: all files of the repository.
    `readme`: text of README.md; its `configs` may name the files of each split. No files: the split does not exist, or it
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


def lacks_shards(path: str, files: Sequence[str]) -> bool:
    """Return whether `files`, chosen for `path`, are a part of a set train-00000-of-00002, ... A named file needs no others."""
    numbers: dict[str, set[str]] = {}
    for file in files:
        if match := _SHARD.search(file):
            numbers.setdefault(_SHARD.sub(r"-*-of-\2", file), set()).add(match[1])
    return path not in files and any(len(each) < int(form.rpartition("-of-")[2][:5]) for form, each in numbers.items())


def check_one_form(name: HubName, files: Sequence[str]) -> None:
    """Raise HubError if `files` have a split in several forms, e.g. train.jsonl and train.parquet: its rows would be doubled."""
    for split, forms in several_forms(files).items():
        named = " or ".join(str(replace(name, path=form)) for form in forms)
        raise HubError(
            f"{name.repo} has {split} in several forms, so its rows would be doubled: {', '.join(files)}",
            f"name one form: {named}",
        )


def several_forms(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the splits that `files` have in several forms: {"default/train": ["train.jsonl", "train-*-of-00002.parquet"]}."""
    forms: dict[str, dict[str, None]] = {}
    for file in files:
        if split := _split_of(file):
            forms.setdefault(split, {})[form_of(file)] = None
    return {split: list(several) for split, several in forms.items() if len(several) > 1}


def form_of(file: str) -> str:
    """Return the pattern of a file and the other shards of its set: train-*-of-00002.parquet, main/train/*.parquet."""
    return re.sub(r"/\d+\.parquet$", "/*.parquet", _SHARD.sub(r"-*-of-\2", file))


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
        if split := _split_of(file):
            splits.setdefault(split, []).append(file)
    return splits


def _split_of(file: str) -> str | None:
    """Return "CONFIG/SPLIT" of a file by its name; None if it is named after no split."""
    if match := _CONVERTED_FILE.fullmatch(file):
        return f"{match['config']}/{match['split']}"
    if (match := _NAMED.fullmatch(file)) is None:
        return None
    config = "default" if match["folder"] in (None, "data") else match["folder"].removeprefix("data/")
    return None if "/" in config else f"{config}/{match['split']}"


def _matches(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern.removeprefix("./").replace("**", "*"))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
