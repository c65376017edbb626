"""`data.columns` for the training rows: as megarl knows a data set on the hub, or as the files here have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.data.columns import ColumnSelection
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import layout_of
from megarl.data.rows import column_names
from megarl.data.sft import SFTDataset
from megarl.hf import hub
from megarl.rewards.weighted import needed_columns

_HUB_DATA_SETS = {"openai/gsm8k": ("question", "answer", "gsm8k")}
"""The columns of questions and answers, and the scorer. The rows have no `data_source`."""
_ANSWER = {"grpo": "ground_truth", "dapo": "ground_truth", "sft": "response"}
"""The key of `data.columns` for the column of answers, by task."""
_USUAL = {"prompt": ("question", "problem"), "ground_truth": ("ground_truth", "answer"), "response": ("answer",)}
"""Usual names of a column in files."""
_EXAMPLES = {
    "sft": "{prompt: question, response: answer}",
    "dpo": "{prompt: question, chosen: better, rejected: worse}",
}


def columns_of(task: str, files: Sequence[str]) -> dict[str, str]:
    """Return `data.columns` for the files; empty if no column has another name, or megarl does not know the columns.

    For files on this machine it is a guess by usual names.
    """
    if (entry := _entry(files)) is not None and task in _ANSWER:
        question, answer, _ = entry
        return {"prompt": question, _ANSWER[task]: answer}
    columns_of_files = [set(columns) for _, columns in _local_columns(files)]
    if not columns_of_files or len(columns_of_files) < len(files):
        return {}
    in_any, in_all = set.union(*columns_of_files), set.intersection(*columns_of_files)
    if task == "sft" and "messages" in in_any:
        return {}
    usual = {}
    for key in ("prompt", *([_ANSWER[task]] if task in _ANSWER else [])):
        default = {"ground_truth": "reward_model"}.get(key, key)
        names = [name for name in _USUAL[key] if name in in_all]
        if names and default not in in_any:
            usual[key] = names[0]
    return usual


def scorer_of(files: Sequence[str]) -> str | None:
    """Return the scorer of the files' data set; None if megarl does not know it."""
    entry = _entry(files)
    return entry[2] if entry is not None else None


def column_remarks(task: str, files: Sequence[str], columns: Mapping[str, str], function: str | None) -> list[str]:
    """Return remarks about the columns: names that the recipe has, columns that a file lacks, and files that were not read.

    columns: `data.columns`. function: `reward.function`; None: each row's data source selects the scorer.
    """
    remarks = []
    if columns:
        shown = ", ".join(f"{key}: {name}" for key, name in columns.items())
        names = ", ".join(dict.fromkeys(_repo(file) or file for file in files))
        of_hub = _entry(files) is not None
        remarks.append(
            f"data.columns {'has the column names' if of_hub else 'is guessed from the columns'} of {names}: {shown}"
        )
    selection = ColumnSelection(_layouts(task, function), (), columns)
    for file, present in _local_columns(files):
        try:
            selection.check(file, present)
        except ValueError as error:
            remarks.append(str(error))
    on_hub = [file for file in files if _repo(file)]
    if on_hub and not columns:
        example = _EXAMPLES.get(task, "{prompt: question, ground_truth: answer}")
        remarks.append(
            f"the columns of {', '.join(on_hub)} are not checked here: if they differ from docs/data.md, name them in data.columns, "
            f"as in columns: {example}"
        )
    return remarks


def lack_data_source(files: Sequence[str]) -> bool:
    """Return whether a file on this machine has no column that could select the scorer."""
    return any("data_source" not in columns for _, columns in _local_columns(files))


def _layouts(task: str, function: str | None) -> Sequence[Sequence[str]]:
    """Return the alternative sets of columns that rows must have."""
    if task == "sft":
        return SFTDataset.layouts
    if task == "dpo":
        return PreferenceDataset.layouts
    return layout_of(needed_columns(function, {}))[0]


def _local_columns(files: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each file that is on this machine, and its columns."""
    for file in files:
        if not file.startswith(hub.PREFIX) and Path(file).exists():
            yield file, column_names(Path(file))


def _entry(files: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the entry of the data set that all files are of; None if there is none."""
    entries = {_HUB_DATA_SETS.get(_repo(file)) for file in files}
    return entries.pop() if len(entries) == 1 else None


def _repo(file: str) -> str:
    """Return the repository of rows on the hub; "" for a file."""
    name = hub.data_name(file)
    return name.repo if name is not None else ""
