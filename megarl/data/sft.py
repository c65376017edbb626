"""Demonstrations for supervised fine-tuning: the loss counts what the assistant says, and its end token."""

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
from megarl.data.rows import Row, messages_of
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig


@dataclass(frozen=True)
class Example:
    """One demonstration. It ends with the last token that the loss counts.

    Attributes:
        tokens: int32 [L].
        loss_mask: bool [L]: the assistant's tokens, each turn's end token among them.
        text: what the assistant says, for people.
    """

    uid: str
    data_source: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    text: str

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that the loss counts."""
        return int(np.argmax(self.loss_mask))


@dataclass(frozen=True)
class Conversation:
    """What becomes an example. The first `given` messages are not learned, whoever says them."""

    row: Row
    messages: list[dict[str, Any]]
    given: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """A stretch of a rendered conversation, tokenised on its own.

    A prompt's ids are then the same in training and in sampling, where nothing follows it.
    """

    text: str
    learned: bool


class SFTDataset(RowDataset[Example]):
    """Rows with ``prompt`` and ``response``, or with ``messages`` (and ``tools``), rendered and tokenised once.

    With ``messages``, every assistant turn is learned, its tool calls among it; the chat template is shown the tools.
    Without a chat template, contents are joined as they stand and the end token follows each assistant turn.

    Raises:
        ValueError: a file, column or conversation is wrong, or an example is longer than
            the limit and the recipe does not filter (or all of them are).
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
    """`source`: the data source of a row that names none."""
    return Example(uid, row.get("data_source", str) or source, text.tokens, text.loss_mask, text.text)


def encode_demonstrations(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
    """Each row's conversation, with all of the assistant's turns in the loss mask."""
    talks = [Conversation(row, _conversation(row), tools=tools_of(row)) for row in rows]
    return encode_conversations(talks, tokenizer, config)


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, config: DataConfig
) -> list[Encoded]:
    """One text each, up to the last token that the loss counts."""
    pieces = [_pieces(talk, tokenizer, config) for talk in conversations]
    ids = iter(tokenizer.encode_batch([piece.text for conversation in pieces for piece in conversation]))
    encoded = []
    for talk, parts in zip(conversations, pieces, strict=True):
        tokens, mask = _join(talk.row, [(next(ids), part.learned) for part in parts], tokenizer, config.chat_template)
        learned = [message for message in talk.messages[talk.given :] if message["role"] == "assistant"]
        encoded.append(Encoded(tokens, mask, "".join(_said(message) for message in learned)))
    return encoded


def tools_of(row: Row) -> list[dict[str, Any]]:
    """The column ``tools``: descriptions of functions, as chat templates are given them; [] where there are none."""
    return [_without_empty(tool) for tool in row.get("tools", list) or []]


def _without_empty(value: Any) -> Any:
    """Parquet gives every struct the fields of all others, as None."""
    if isinstance(value, dict):
        return {name: _without_empty(part) for name, part in value.items() if part is not None}
    return [_without_empty(part) for part in value] if isinstance(value, list) else value


def _said(message: dict[str, Any]) -> str:
    calls = [json.dumps(_without_empty(call), ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def _conversation(row: Row) -> list[dict[str, Any]]:
    if row.values.get("messages") is not None:
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


def _pieces(talk: Conversation, tokenizer: Tokenizer, config: DataConfig) -> list[_Piece]:
    row, messages = talk.row, talk.messages

    def learned(number: int) -> bool:
        return number >= talk.given and messages[number]["role"] == "assistant"

    def rendered(turns: list[dict[str, Any]], generate: bool) -> str:
        try:
            return tokenizer.render_text(turns, config.chat_template, config.chat_template_args, generate, talk.tools)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error

    if not config.chat_template:
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
    """Tokens and loss mask, up to the last token that counts."""
    tokens = tokenizer.leading_ids(chat_template)
    mask = [False] * len(tokens)
    for ids, learned in parts:
        counted = 0
        if learned and not chat_template:
            ids = [*ids, tokenizer.eos_id]
            counted = len(ids)
        elif learned:  # what a template writes after the end token (a line break) nobody samples
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
