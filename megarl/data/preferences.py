"""Preference pairs for DPO: a chosen and a rejected answer to a prompt. Only answer tokens count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.cache import Encoded
from megarl.data.dataset import RowDataset
from megarl.data.encode import Encode
from megarl.data.rows import Row, messages_of
from megarl.data.sft import Conversation, Example, encode_conversations, example_of
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig

Pair = tuple[Example, Example]
"""(chosen, rejected); each example includes the prompt."""


class PreferenceDataset(RowDataset[Pair]):
    """Rows with ``prompt``, ``chosen`` and ``rejected``, or with the latter two as whole conversations.

    An answer is text, or messages that end with the assistant's; only the last message counts in the loss. A row is too
    long if the prompt with either answer exceeds the limit.

    Raises:
        ValueError: a file, column or conversation is wrong; the two prompts of a row differ; its answers are equal; or an
            answer exceeds the limit and the recipe does not filter (or all rows do).
    """

    layouts = (("chosen", "rejected"),)
    optional = ("prompt", "data_source", "extra_info")
    source = "preferences"
    per_row = 2
    too_long = "pairs have an answer that is longer than data.max_prompt_length + rollout.max_response_length"

    def encode(self) -> Encode:
        return encode_pairs

    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Pair:
        chosen, rejected = (example_of(row, uid, text, self.source) for text in texts)
        return chosen, rejected


def encode_pairs(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
    """Return the chosen and then the rejected text of each row."""
    conversations = [conversation for row in rows for conversation in _conversations(row)]
    return encode_conversations(conversations, tokenizer, config)


def _conversations(row: Row) -> list[Conversation]:
    chosen, rejected = (_messages(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(f"{row.where}: 'chosen' and 'rejected' do not answer the same prompt")
    if chosen[-1] == rejected[-1]:
        raise ValueError(f"{row.where}: 'chosen' and 'rejected' are the same answer, so nothing is preferred")
    return [Conversation(row, messages, first_learned=len(messages) - 1) for messages in (chosen, rejected)]


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the conversation that ends with the answer in `column`."""
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
