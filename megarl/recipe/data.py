"""The recipe's section `data`: files, prompts and tokenization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from megarl.recipe.key import key


@dataclass
class MixedSet:
    """An entry of `data.mix`."""

    files: list[str] = key([], "Rows of the set, as `data.train_files`.")
    weight: float = key(1.0, "Weight of the set. Its share of the rows is this over the sum of all weights.", above=0)


@dataclass
class DataConfig:
    """Prompts: parquet or JSONL rows in verl's columns. docs/data.md describes the columns and how to make them."""

    train_files: list[str] = key(
        [],
        "Training rows: .parquet or .jsonl files, or data sets on the hub: hf://openai/gsm8k/main/train (docs/hub.md). `train` requires this key or `data.mix`.",
    )
    mix: dict[str, MixedSet] = key(
        {},
        "Several training sets drawn by weight, instead of `train_files`: a name with `files` and `weight` (1), e.g. {gsm8k: {files: [a.parquet]}, math: {files: [b.parquet], weight: 3}}. The weight alone sets the share of a set, not its size. Each set has separate epochs.",
    )
    columns: dict[str, str] = key(
        {},
        "Names of columns in your files where they differ from docs/data.md, e.g. {prompt: question, response: extra_info.solution}; a dot reads a field of a column. `ground_truth` names a column of plain answers, instead of `reward_model`. Applies to all files.",
    )
    eval_files: list[str] = key(
        [], "Held-out rows for evaluation, in the columns of the training rows, as `data.train_files`."
    )
    prompts_per_step: int = key(32, "Prompts per controller step (for SFT: examples).", at_least=1)
    max_prompt_length: int = key(1024, "Maximum length of a prompt, in tokens.", at_least=1)
    overlong_prompts: Literal["error", "filter"] = key(
        "error",
        "Longer prompts. error: reject the data set. filter: leave the prompts out, with a notice of their number per file.",
    )
    shuffle: bool = key(True, "Draw rows in a new random order in each epoch.")
    curriculum: Optional[str] = key(
        None,
        "Name of a number in the rows' `extra_info`, e.g. level. Rows are drawn in ascending order of it. Rows with equal numbers keep the order that `data.shuffle` sets; rows without a number come last. Unset: no such order.",
    )
    curriculum_epochs: Optional[int] = key(
        None,
        "Epochs (of each set) drawn by `data.curriculum`. Later epochs are drawn as `data.shuffle` sets. Unset: all epochs.",
        at_least=1,
    )
    chat_template: Union[bool, str] = key(
        True,
        "true: apply the tokenizer's chat template to the messages of `prompt`. false: the messages' contents are concatenated. Otherwise a template instead of the tokenizer's: a .jinja file, the template's text, `chatml`, or the name of one of several templates of the tokenizer. Tool messages are rendered with it, too, and exported models have it.",
    )
    prompt_suffix: str = key(
        "",
        "Text appended to the last user message of every prompt (not of demonstrations), e.g. the form of the answer.",
    )
    chat_template_args: dict[str, Any] = key({}, "Arguments of the chat template, e.g. {enable_thinking: false}.")
    min_pixels: Optional[int] = key(
        None,
        "Smaller images and frames of videos are enlarged to this many pixels. Unset: the image processor's setting.",
        at_least=1,
    )
    max_pixels: Optional[int] = key(
        None,
        "Larger images and frames of videos are shrunk to this many pixels. A token covers 28 x 28 pixels in Qwen2.5-VL and 32 x 32 in Qwen3-VL. Unset: the image processor's setting.",
        at_least=1,
    )
    workers: Optional[int] = key(
        None,
        "Processes that render and tokenize rows. Unset: one per 20,000 rows that are not in the cache, at most one per core.",
        at_least=1,
    )
    cache: Optional[str] = key(
        "~/.cache/megarl",
        "Directory for tokenized rows of files with at least 1,000 rows, by the contents of file, tokenizer and template. You may delete it at any time. null: no cache.",
    )

    @property
    def applies_template(self) -> bool:
        """True if a chat template renders the messages, the tokenizer's or another."""
        return self.chat_template is not False


def training_sets(data: DataConfig) -> dict[str, list[str]]:
    """Return the training files by the name of their set; `train` without `data.mix`."""
    return {name: part.files for name, part in data.mix.items()} if data.mix else {"train": data.train_files}


def files_of(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield (setting, file) for every file, training files first."""
    yield from (("data.train_files", file) for file in data.train_files)
    yield from ((f"data.mix.{name}.files", file) for name, part in data.mix.items() for file in part.files)
    yield from (("data.eval_files", file) for file in data.eval_files)
