"""The prompts that the policy is trained and evaluated on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from megarl.config.schema import DataConfig
from megarl.data.rows import Row, messages_of, read_rows, unique_uids
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


class PromptDataset(Sequence[Prompt]):
    """Rows with the columns ``prompt``, ``data_source``, ``reward_model.ground_truth`` and, where
    present, ``extra_info``, rendered and tokenised once.

    Attributes:
        filtered: rows left out because their prompt is too long.
        data_sources: those of the rows that stayed, sorted.

    Raises:
        ValueError: a file or column is wrong, or a prompt is longer than `data.max_prompt_length`
            and the recipe does not filter (or all of them are).
    """

    def __init__(self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig) -> None:
        rows = read_rows(files, ("prompt", "data_source", "reward_model"), optional=("extra_info",))
        texts = [_render(row, tokenizer, config) for row in rows]
        leading = tokenizer.leading_ids(config.chat_template)
        tokens = [tuple(leading + ids) for ids in tokenizer.encode_batch(texts)]
        uids = unique_uids(rows, "row")
        prompts = [_prompt(*parts) for parts in zip(rows, uids, texts, tokens, strict=True)]
        self._prompts = keep_short(
            prompts,
            [len(prompt.tokens) for prompt in prompts],
            [row.where for row in rows],
            limit=config.max_prompt_length,
            what="prompts are longer than data.max_prompt_length",
            refuse=config.overlong_prompts == "error",
        )
        self.filtered = len(prompts) - len(self._prompts)
        self.data_sources = sorted({prompt.data_source for prompt in self._prompts})

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self._prompts[index]


def keep_short(
    items: list[Any], lengths: list[int], where: list[str], limit: int, what: str, refuse: bool
) -> list[Any]:
    """The items of at most `limit` tokens.

    Raises:
        ValueError: some are longer and `refuse` is set, or all are longer.
    """
    kept = [item for item, length in zip(items, lengths, strict=True) if length <= limit]
    over = len(items) - len(kept)
    if over and (refuse or not kept):
        longest = max(range(len(items)), key=lambda i: lengths[i])
        advice = "" if not kept else ", or set data.overlong_prompts: filter to leave them out"
        raise ValueError(
            f"{over} of {len(items)} {what} ({limit} tokens); the longest has {lengths[longest]} "
            f"({where[longest]}). Raise the limit{advice}"
        )
    return kept


def _render(row: Row, tokenizer: Tokenizer, config: DataConfig) -> str:
    messages = messages_of(row, "prompt")
    try:
        return tokenizer.render_text(messages, config.chat_template, config.chat_template_args)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error


def _prompt(row: Row, uid: str, text: str, tokens: tuple[int, ...]) -> Prompt:
    reward_model = row.need("reward_model", dict)
    if "ground_truth" not in reward_model:
        raise ValueError(f"{row.where}: reward_model has no ground_truth, but {sorted(reward_model)}")
    if not tokens:
        raise ValueError(f"{row.where}: the prompt is empty")
    return Prompt(
        uid=uid,
        tokens=tokens,
        text=text,
        data_source=row.need("data_source", str),
        ground_truth=reward_model["ground_truth"],
        extra_info=row.get("extra_info", dict) or {},
    )
