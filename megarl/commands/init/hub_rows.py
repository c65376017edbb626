"""Columns of data sets on the hub: `data.columns` of a known one, and a remark about any other."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.commands.init.answers import samples
from megarl.hf import hub

_QUESTIONS = {"openai/gsm8k": ("question", "answer", "gsm8k")}
"""Data sets of questions: the columns of questions and answers, and the scorer. Their rows have no `data_source`."""
_EXAMPLES = {
    "sft": "{prompt: question, response: answer}",
    "dpo": "{prompt: question, chosen: better, rejected: worse}",
}


def columns_of(task: str, files: Sequence[str]) -> dict[str, str] | None:
    """Return `data.columns` for the files; None if megarl does not know the columns of each."""
    entry = _entry(files)
    if entry is None or task == "dpo":
        return None
    question, answer, _ = entry
    return {"prompt": question, "ground_truth" if samples(task) else "response": answer}


def scorer_of(files: Sequence[str]) -> str | None:
    """Return the scorer of the files' data set; None if megarl does not know it."""
    entry = _entry(files)
    return entry[2] if entry is not None else None


def columns_remark(task: str, files: Sequence[str], columns: dict[str, str] | None) -> str | None:
    """Return a remark about the columns of files on the hub; None if there are none. columns: as the recipe has them."""
    on_hub = [file for file in files if _repo(file)]
    if not on_hub:
        return None
    if columns is not None:
        return f"data.columns has the column names of {_repo(on_hub[0])}: {', '.join(columns.values())}"
    example = _EXAMPLES.get(task, "{prompt: question, ground_truth: answer}")
    return (
        f"the columns of {', '.join(on_hub)} are not checked here: if they differ from docs/data.md, name them in data.columns, "
        f"as in columns: {example}"
    )


def _entry(files: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the entry of the data set that all files are of; None if there is none."""
    entries = {_QUESTIONS.get(_repo(file)) for file in files}
    return entries.pop() if len(entries) == 1 else None


def _repo(file: str) -> str:
    """Return the repository of rows on the hub; "" for a file."""
    name = hub.data_name(file)
    return name.repo if name is not None else ""
