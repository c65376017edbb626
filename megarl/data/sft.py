"""Demonstrations for supervised fine-tuning. The assistant's tokens and the end token of each turn count in the loss."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.cache import Encoded
from megarl.data.dataset import RowDataset
from megarl.data.encode import Encode
from megarl.data.rows import Row, content_text, messages_of
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig


@dataclass(frozen=True)
class Example:
    """One demonstration, cut after the last token that counts in the loss.

    Attributes:
        tokens: int32 [L].
        loss_mask: bool [L]: the assistant's tokens, including the end token of each turn.
        text: the assistant's messages, for logs.
    """

    uid: str
    data_source: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    text: str

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that counts in the loss."""
        return int(np.argmax(self.loss_mask))


@dataclass(frozen=True)
class Conversation:
    """A conversation to encode. `messages[:first_learned]` never count in the loss."""

    row: Row
    messages: list[dict[str, Any]]
    first_learned: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """A part of a rendered conversation that is tokenized separately.

    A prompt then has the same ids in training as in sampling, where no answer follows it.
    """

    text: str
    learned: bool


class SFTDataset(RowDataset[Example]):
    """Rows with ``prompt`` and ``response``, or with ``messages`` (and ``tools``), rendered and tokenized once.

    With ``messages``, every assistant turn counts in the loss, including tool calls; the chat template renders the tools.
    Without a chat template, contents are concatenated and the end token follows each assistant turn.

    Raises:
        ValueError: a file, column or conversation is wrong, or an example exceeds the limit and the recipe does not
            filter (or all examples do).
    """

    layouts = (("messages",), ("prompt", "response"))
    optional = ("data_source", "extra_info", "tools")
    source = "sft"
    too_long = "examples are longer than data.max_prompt_length + rollout.max_response_length"

    def encode(self) -> Encode:
        return encode_demonstrations

    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Example:
        return example_of(row, uid, texts[0], self.source)


def example_of(row: Row, uid: str, text: Encoded, source: str) -> Example:
    """Build a row's example. `source`: data source of a row without one."""
    return Example(uid, row.get("data_source", str) or source, text.tokens, text.loss_mask, text.text)


def encode_demonstrations(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
    """Encode each row's conversation with all assistant turns in the loss mask."""
    conversations = [
        Conversation(row, _messages(row, config), tools=_without_empty(row.get("tools", list) or [])) for row in rows
    ]
    return encode_conversations(conversations, tokenizer, config)


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, config: DataConfig
) -> list[Encoded]:
    """Return one text per conversation, cut after the last token that counts in the loss."""
    pieces = [_pieces(conversation, tokenizer, config) for conversation in conversations]
    ids = iter(tokenizer.encode_batch([piece.text for parts in pieces for piece in parts]))
    encoded = []
    for conversation, parts in zip(conversations, pieces, strict=True):
        tokenized = [(next(ids), part.learned) for part in parts]
        tokens, mask = _join(conversation.row, tokenized, tokenizer, config.applies_template)
        candidates = conversation.messages[conversation.first_learned :]
        answers = [message for message in candidates if message["role"] == "assistant"]
        encoded.append(Encoded(tokens, mask, "".join(_text_and_calls(message) for message in answers)))
    return encoded


def _without_empty(value: Any) -> Any:
    """Drop None fields recursively: Parquet adds fields that a struct lacks as None."""
    if isinstance(value, dict):
        return {name: _without_empty(part) for name, part in value.items() if part is not None}
    return [_without_empty(part) for part in value] if isinstance(value, list) else value


def _text_and_calls(message: dict[str, Any]) -> str:
    calls = [json.dumps(_without_empty(call), ensure_ascii=False) for call in message.get("tool_calls") or []]
    text = content_text(message["content"])
    return "\n".join([*([text] if text else []), *calls])


def _messages(row: Row, config: DataConfig) -> list[dict[str, Any]]:
    """Return a row's conversation: `messages`, unless it is empty or `data.columns` names prompt or response alone."""
    names_a_prompt = {"prompt", "response"} & config.columns.keys() and "messages" not in config.columns
    if row.values.get("messages") is not None and not names_a_prompt:
        messages = messages_of(row, "messages")
    else:
        answer = {"role": "assistant", "content": row.need("response", str)}
        messages = [*messages_of(row, "prompt"), answer]
    roles = [message["role"] for message in messages]
    for message in messages:
        if message.get("tool_calls"):
            message["tool_calls"] = _without_empty(message["tool_calls"])
    if roles[0] == "assistant" or "assistant" not in roles:
        raise ValueError(f"{row.where}: a conversation needs a prompt and then an answer, but the roles are {roles}")
    return messages


def _pieces(conversation: Conversation, tokenizer: Tokenizer, config: DataConfig) -> list[_Piece]:
    row, messages, tools = conversation.row, conversation.messages, conversation.tools

    def learned(number: int) -> bool:
        return number >= conversation.first_learned and messages[number]["role"] == "assistant"

    def rendered(turns: list[dict[str, Any]], generate: bool) -> str:
        try:
            return tokenizer.render_text(turns, config.applies_template, config.chat_template_args, generate, tools)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error

    if not config.applies_template:
        turns = itertools.groupby(range(len(messages)), key=learned)
        return [_Piece(rendered([messages[n] for n in turn], generate=False), is_learned) for is_learned, turn in turns]
    whole = rendered(messages, generate=False)
    pieces, position = [], 0
    for number in range(len(messages)):
        if not learned(number):
            continue
        before = rendered(messages[:number], generate=True)
        through = rendered(messages[: number + 1], generate=False)
        if not (whole.startswith(through) and through.startswith(before) and len(before) >= position):
            raise ValueError(
                f"{row.where}: the chat template writes turn {number} differently within the whole conversation than "
                f"at its end, so the tokens the loss should count are not known. Templates that drop earlier reasoning "
                f"do this: split the conversation into rows that end with the turn to learn"
            )
        pieces += [_Piece(whole[position : len(before)], False), _Piece(whole[len(before) : len(through)], True)]
        position = len(through)
    return pieces


def _join(
    row: Row, parts: list[tuple[list[int], bool]], tokenizer: Tokenizer, chat_template: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate tokens and loss mask, cut after the last token that counts in the loss."""
    tokens = tokenizer.leading_ids(chat_template)
    mask = [False] * len(tokens)
    for ids, learned in parts:
        counted = 0
        if learned and not chat_template:
            ids = [*ids, tokenizer.eos_id]
            counted = len(ids)
        elif learned:  # text that a template writes after the end token (a line break) is never sampled
            ends = [place for place, number in enumerate(ids) if number in tokenizer.end_ids]
            if not ends:
                raise ValueError(
                    f"{row.where}: the chat template in {tokenizer.directory} closes an assistant turn with none of "
                    f"the tokenizer's special tokens, so a model trained on it would never learn to stop"
                )
            counted = ends[-1] + 1
        tokens += ids
        mask += [True] * counted + [False] * (len(ids) - counted)
    length = len(mask) - mask[::-1].index(True)
    return np.array(tokens[:length], dtype=np.int32), np.array(mask[:length], dtype=bool)
