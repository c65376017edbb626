"""Demonstrations for supervised fine-tuning: the loss counts what the assistant says, and its end token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config.schema import DataConfig
from megarl.data.prompts import keep_short
from megarl.data.rows import Row, messages_of, read_rows, unique_uids
from megarl.data.tokenizer import Tokenizer


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
    uid: str
    messages: list[dict[str, Any]]
    given: int = 0


@dataclass(frozen=True)
class _Piece:
    """A stretch of a rendered conversation, tokenised on its own.

    A prompt's ids are then the same in training and in sampling, where nothing follows it.
    """

    text: str
    learned: bool


class SFTDataset(Sequence[Example]):
    """Rows with ``prompt`` and ``response``, or with ``messages``, rendered and tokenised once.

    With ``messages``, every assistant turn is learned. Without a chat template, contents are joined
    as they stand and the end token follows each assistant turn.

    Attributes:
        filtered: rows left out because they are longer than `max_length`.

    Raises:
        ValueError: a file, column or conversation is wrong, or an example is longer than
            `max_length` tokens and the recipe does not filter (or all of them are).
    """

    def __init__(self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, max_length: int) -> None:
        rows = read_rows(files, ("messages",), ("prompt", "response"), optional=("data_source", "extra_info"))
        uids = unique_uids(rows, "sft")
        conversations = [Conversation(row, uid, _conversation(row)) for row, uid in zip(rows, uids, strict=True)]
        examples = tokenise(conversations, tokenizer, config, source="sft")
        self._examples = keep_short(
            examples,
            [len(example.tokens) for example in examples],
            [row.where for row in rows],
            limit=max_length,
            what="examples are longer than data.max_prompt_length + rollout.max_response_length",
            refuse=config.overlong_prompts == "error",
        )
        self.filtered = len(examples) - len(self._examples)

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        return self._examples[index]


def tokenise(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, config: DataConfig, source: str
) -> list[Example]:
    """One example each. `source`: the data source of a row that names none."""
    pieces = [_pieces(talk, tokenizer, config) for talk in conversations]
    ids = iter(tokenizer.encode_batch([piece.text for conversation in pieces for piece in conversation]))
    examples = []
    for talk, parts in zip(conversations, pieces, strict=True):
        tokens, mask = _join(talk.row, [(next(ids), part.learned) for part in parts], tokenizer, config.chat_template)
        learned = [message for message in talk.messages[talk.given :] if message["role"] == "assistant"]
        said = "".join(message["content"] or "" for message in learned)
        examples.append(Example(talk.uid, talk.row.get("data_source", str) or source, tokens, mask, said))
    return examples


def _conversation(row: Row) -> list[dict[str, Any]]:
    if row.values.get("messages") is not None:
        messages = messages_of(row, "messages")
    else:
        answer = {"role": "assistant", "content": row.need("response", str)}
        messages = [*messages_of(row, "prompt"), answer]
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant" or "assistant" not in roles:
        raise ValueError(f"{row.where}: a conversation needs a prompt and then an answer, but the roles are {roles}")
    return messages


def _pieces(talk: Conversation, tokenizer: Tokenizer, config: DataConfig) -> list[_Piece]:
    row, messages = talk.row, talk.messages

    def learned(number: int) -> bool:
        return number >= talk.given and messages[number]["role"] == "assistant"

    def rendered(turns: list[dict[str, Any]], generate: bool) -> str:
        try:
            return tokenizer.render_text(turns, config.chat_template, config.chat_template_args, generate)
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
