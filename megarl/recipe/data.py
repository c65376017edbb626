"""Settings of the data, and what is refused of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Optional

from megarl.recipe.key import key

if TYPE_CHECKING:
    pass


@dataclass
class MixedSet:
    """One of the sets of `data.mix`."""

    files: list[str] = key([], "Its rows: .parquet or .jsonl files.")
    weight: float = key(1.0, "Its share of the rows drawn is this over the sum of all sets' weights.", above=0)


@dataclass
class DataConfig:
    """Prompts: parquet or JSONL rows in verl's columns. docs/data.md says what the columns are, and how to make them."""

    train_files: list[str] = key(
        [], "Training rows: .parquet or .jsonl files. `train` requires them, or `data.mix` instead."
    )
    mix: dict[str, MixedSet] = key(
        {},
        "Several training sets drawn from by weight, instead of `train_files`: by name `files` and `weight` (1), e.g. {gsm8k: {files: [a.parquet]}, math: {files: [b.parquet], weight: 3}}. Rows of a set are drawn at its rate, whatever its size; each has epochs of its own.",
    )
    eval_files: list[str] = key([], "Held-out rows for evaluation, in the columns of the training rows.")
    prompts_per_step: int = key(32, "Prompts a controller step (for SFT: examples).", at_least=1)
    max_prompt_length: int = key(1024, "Longest prompt, in tokens.", at_least=1)
    overlong_prompts: Literal["error", "filter"] = key(
        "error", "Prompts past that length: refuse the data set, or leave them out and say how many of which file."
    )
    shuffle: bool = key(True, "Draw rows in a new random order each epoch.")
    curriculum: Optional[str] = key(
        None,
        "Draw rows by this number of their `extra_info`, the smallest first, e.g. level; rows of the same number as `data.shuffle` says, rows without one last. Unset: no such order.",
    )
    curriculum_epochs: Optional[int] = key(
        None,
        "Epochs (of each set) that are drawn by `data.curriculum`; those after them as `data.shuffle` says. Unset: all.",
        at_least=1,
    )
    chat_template: bool = key(
        True,
        "Apply the tokenizer's chat template to `prompt`'s messages. Off: their contents are joined as they stand.",
    )
    prompt_suffix: str = key(
        "", "Text behind the last user message of every prompt (not of demonstrations), e.g. the form of the answer."
    )
    chat_template_args: dict[str, Any] = key({}, "Arguments of the chat template, e.g. {enable_thinking: false}.")
    min_pixels: Optional[int] = key(
        None, "Smaller images are enlarged to so many pixels. Unset: what the model's image processor says.", at_least=1
    )
    max_pixels: Optional[int] = key(
        None,
        "Larger images are shrunk to so many pixels; of Qwen2.5-VL a token shows 28 x 28 of them. Unset: what the model's image processor says.",
        at_least=1,
    )
    workers: Optional[int] = key(
        None,
        "Processes that render and tokenise rows. Unset: one for every 20,000 rows that are not in the cache, at most one a core.",
        at_least=1,
    )
    cache: Optional[str] = key(
        "~/.cache/megarl",
        "Where tokenised rows are kept, of files of 1,000 rows and more, by the contents of file, tokenizer and template. It may be deleted at any time. null: nowhere.",
    )


def training_sets(data: DataConfig) -> dict[str, list[str]]:
    """Training files by the name of their set: `train` where nothing is mixed."""
    return {name: part.files for name, part in data.mix.items()} if data.mix else {"train": data.train_files}


def files_of(data: DataConfig) -> Iterator[tuple[str, str]]:
    """(the setting that names it, file) of every file; those to learn from first."""
    yield from (("data.train_files", file) for file in data.train_files)
    yield from ((f"data.mix.{name}.files", file) for name, part in data.mix.items() for file in part.files)
    yield from (("data.eval_files", file) for file in data.eval_files)
