"""Preferences for DPO: two answers to a prompt, of which one is better. The loss counts the answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from megarl.config.schema import DataConfig
from megarl.data.prompts import keep_short
from megarl.data.rows import Row, messages_of, read_rows, unique_uids
from megarl.data.sft import Conversation, Example, tokenise
from megarl.data.tokenizer import Tokenizer

Pair = tuple[Example, Example]
"""The chosen answer and the rejected one, each after the prompt."""


class PreferenceDataset(Sequence[Pair]):
    """Rows with ``prompt``, ``chosen`` and ``rejected``, or with the latter two as whole conversations.

    An answer is text, or messages of which the last is the assistant's; only that last one counts in the loss.

    Attributes:
        filtered: rows left out because one of their answers is longer than `max_length` with its prompt.

    Raises:
        ValueError: a file, column or conversation is wrong, the two prompts of a row differ, its answers do not, or one
            is longer than `max_length` tokens and the recipe does not filter (or all of them are).
    """

    def __init__(self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, max_length: int) -> None:
        rows = read_rows(files, ("chosen", "rejected"), optional=("prompt", "data_source", "extra_info"))
        uids = unique_uids(rows, "preferences")
        talks = [talk for row, uid in zip(rows, uids, strict=True) for talk in _conversations(row, uid)]
        examples = tokenise(talks, tokenizer, config, source="preferences")
        pairs = list(zip(examples[::2], examples[1::2], strict=True))
        self._pairs = keep_short(
            pairs,
            [max(len(chosen.tokens), len(rejected.tokens)) for chosen, rejected in pairs],
            [row.where for row in rows],
            limit=max_length,
            what="pairs have an answer that is longer than data.max_prompt_length + rollout.max_response_length",
            refuse=config.overlong_prompts == "error",
        )
        self.filtered = len(pairs) - len(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        return self._pairs[index]


def _conversations(row: Row, uid: str) -> list[Conversation]:
    chosen, rejected = (_messages(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(f"{row.where}: 'chosen' and 'rejected' do not answer the same prompt")
    if chosen[-1] == rejected[-1]:
        raise ValueError(f"{row.where}: 'chosen' and 'rejected' are the same answer, so nothing is preferred")
    return [Conversation(row, uid, messages, given=len(messages) - 1) for messages in (chosen, rejected)]


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    """The whole conversation that ends with the answer in `column`."""
    answer = row.need(column, object)
    if isinstance(answer, str):
        messages = [*messages_of(row, "prompt"), {"role": "assistant", "content": answer}]
    else:
        messages = messages_of(row, column)
        if len(messages) == 1:
            messages = [*messages_of(row, "prompt"), *messages]
    roles = [message["role"] for message in messages]
    if len(roles) < 2 or roles[-1] != "assistant":
        raise ValueError(f"{row.where}: {column!r} must end with the assistant's answer, but the roles are {roles}")
    return messages
