"""Text to token ids and back: a Hugging Face tokenizer directory, or a bare sentencepiece ``tokenizer.model``."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megarl.hf.config import text_fields

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class Tokenizer(ABC):
    """What megarl needs of a tokenizer.

    Attributes:
        directory: where it was loaded from.
        vocab_size: largest id + 1.
        eos_id: the token that ends a response.
        stop_ids: every token that ends generation: `eos_id` first, then what the model's
            generation_config.json adds.
        bos_ids: what plain text begins with, () or (bos,). A chat template writes its own.
        end_ids: every token that may close a turn of a chat template: the special ones.
        chat_template: as the tokenizer has it; None: it has none.
    """

    directory: Path
    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]
    bos_ids: tuple[int, ...] = ()
    end_ids: frozenset[int]
    chat_template: Any = None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text as it stands: no token is added."""

    @abstractmethod
    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of `ids`, special tokens left out, or with them."""

    @abstractmethod
    def tokens(self) -> dict[str, int]:
        """The id of each token, by how the tokenizer writes it."""

    @abstractmethod
    def apply_chat_template(self, messages: Messages, args: dict[str, Any], generate: bool, tools: Tools) -> str:
        """`messages` as the chat template writes them, with the head of a new answer where `generate`."""

    def added_tokens(self) -> frozenset[str]:
        """Texts that become one token of the tokenizer's own wherever they stand, special or not."""
        return frozenset()

    def broken_up(self, text: str) -> str:
        """`text` with a space within whatever spells one of the tokenizer's own tokens: who wrote it cannot end a turn with
        <|im_end|>, and go on in somebody else's name."""
        own = sorted(self.added_tokens(), key=len, reverse=True)
        pattern = "|".join(re.escape(token) for token in own if len(token) > 1)
        return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text) if pattern else text

    def today(self) -> str:
        """The date, where the chat template writes it; else "". What it renders is then another text tomorrow."""
        return ""

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as it stands: no token is added."""
        return self.encode_batch([text])[0]

    def render_text(
        self,
        messages: Messages,
        chat_template: bool,
        args: dict[str, Any] | None = None,
        generate: bool = True,
        tools: Tools = (),
    ) -> str:
        """`messages` as one text: through the chat template, or their contents joined as they stand.

        Raises:
            ValueError: there is no chat template, it refuses the messages, it has no such argument or no place for
                `tools`, or (without it) a content is not text, or there are tools or calls of them.
        """
        if chat_template:
            return self.apply_chat_template(messages, args or {}, generate, tools)
        if tools or any(message.get("tool_calls") for message in messages):
            raise ValueError("tools and tool calls are written by a chat template: set data.chat_template: true")
        if args:
            raise ValueError(f"data.chat_template_args {args} need data.chat_template: true")
        for message in messages:
            if not isinstance(message["content"], str):
                raise ValueError(
                    f"without a chat template a message's content must be text, not {message['content']!r}"
                )
        return "".join(message["content"] for message in messages)

    def leading_ids(self, chat_template: bool) -> list[int]:
        """The ids to put in front of a rendered text."""
        return [] if chat_template else list(self.bos_ids)


def load_tokenizer(directory: str | Path, model_directory: str | Path | None = None) -> Tokenizer:
    """The tokenizer in `directory`; no code from the directory is run.

    A Hugging Face tokenizer is taken where there is one, else a bare sentencepiece
    ``tokenizer.model``. The model's own stop tokens are read from generation_config.json (else
    config.json) in `model_directory`, by default the same directory.

    Raises:
        ValueError: there is no tokenizer, it cannot be read, or it has no end token.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: a tokenizer is a local Hugging Face directory")
    model_stops = _model_stop_ids(Path(model_directory or directory))
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return HuggingFaceTokenizer(directory, model_stops)
    if (directory / "tokenizer.model").is_file():
        return SentencePieceTokenizer(directory, model_stops)
    there = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
    raise ValueError(
        f"{directory} has no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model): {there}"
    )


def unread(chat_template: Any, args: Iterable[str]) -> list[str]:
    """Those of `args` that the template never reads. It ignores what it does not know, so a misspelt one would go unseen."""
    return [name for name in args if not re.search(rf"\b{re.escape(name)}\b", str(chat_template))]


def check_vocabulary(tokenizer: Tokenizer, hf_config: dict[str, Any]) -> None:
    """Refuse a tokenizer that can produce ids for which the model has no embedding.

    `hf_config` is the model's config.json; of a multi-modal one, its text part counts.

    Raises:
        ValueError: the largest id is past the model's vocabulary.
    """
    config = text_fields(hf_config)
    if "vocab_size" not in config:
        raise ValueError(f"the model's config.json has no vocab_size, but {', '.join(sorted(hf_config))}")
    if tokenizer.vocab_size > config["vocab_size"]:
        raise ValueError(
            f"the tokenizer in {tokenizer.directory} has ids up to {tokenizer.vocab_size - 1}, but the model's "
            f"vocab_size is {config['vocab_size']}: they do not belong together. Set model.tokenizer to the model's own"
        )


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Refuse another model's tokenizer in which an id of `tokenizer` stands for something else. It may have more.

    Raises:
        ValueError: with the first such token.
    """
    theirs = other.tokens()
    for token, number in sorted(tokenizer.tokens().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = "no token there" if token not in theirs else f"number {theirs[token]} there"
            raise ValueError(
                f"the tokenizers in {tokenizer.directory} and {other.directory} differ: {token!r}, number {number} of the "
                f"former, is {found}. One model cannot judge the other's tokens: choose models of one family"
            )


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer loaded by transformers."""

    def __init__(self, directory: Path, model_stops: list[int]) -> None:
        from transformers import AutoTokenizer

        self.directory = directory
        try:
            self._hf = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ValueError(f"{directory}: transformers cannot load the tokenizer: {error}") from error
        if self._hf.is_fast:  # what a tokenizer.json says of these is for inference
            self._hf.backend_tokenizer.no_truncation()
            self._hf.backend_tokenizer.no_padding()
        self.chat_template = self._hf.chat_template
        self.vocab_size = max(self._hf.get_vocab().values()) + 1
        self.stop_ids = _stop_ids(directory, self._hf.eos_token_id, model_stops)
        self.eos_id = self.stop_ids[0]
        special = {number for number, token in self._hf.added_tokens_decoder.items() if token.special}
        self.end_ids = frozenset(special | set(self.stop_ids))
        bos = self._hf.bos_token_id
        if bos is not None and self._hf("")["input_ids"][:1] == [bos]:
            self.bos_ids = (int(bos),)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._hf.is_fast:  # without transformers' copies of what is not asked for
            return [
                one.ids for one in self._hf.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        return self._hf(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        numbers = [int(number) for number in ids]
        return self._hf.decode(numbers, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def added_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._hf.added_tokens_decoder.values() if token.content.strip())

    def tokens(self) -> dict[str, int]:
        return self._hf.get_vocab()

    def today(self) -> str:
        return date.today().isoformat() if "strftime_now" in str(self.chat_template) else ""

    def apply_chat_template(self, messages: Messages, args: dict[str, Any], generate: bool, tools: Tools) -> str:
        template = self._hf.chat_template
        if template is None:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template: set data.chat_template: false, or add one"
            )
        if tools and not re.search(r"\btools\b", str(template)):
            raise ValueError(
                f"the template in {self.directory} never reads the tools that a row gives: use another one"
            )
        for name in unread(template, args):
            raise ValueError(f"data.chat_template_args: the template in {self.directory} never reads {name!r}")
        try:
            return self._hf.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate, **args
            )
        except Exception as error:  # a template may raise anything of its own
            raise ValueError(
                f"the chat template in {self.directory} refuses the messages {messages!r}: {error}"
            ) from error


class SentencePieceTokenizer(Tokenizer):
    """A bare sentencepiece model. It says nothing of a leading bos token, so plain text gets none."""

    def __init__(self, directory: Path, model_stops: list[int]) -> None:
        from sentencepiece import SentencePieceProcessor

        self.directory = directory
        path = directory / "tokenizer.model"
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
        self.vocab_size = self._model.get_piece_size()
        eos = self._model.eos_id()
        self.stop_ids = _stop_ids(directory, eos if eos >= 0 else None, model_stops)
        self.eos_id = self.stop_ids[0]
        self.end_ids = frozenset(self.stop_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts))

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        skipped = frozenset() if special else self.end_ids | {self._model.pad_id()}  # -1 where there is none
        return self._model.decode([int(number) for number in ids if int(number) not in skipped])

    def tokens(self) -> dict[str, int]:
        return {self._model.id_to_piece(number): number for number in range(self.vocab_size)}

    def apply_chat_template(self, messages: Messages, args: dict[str, Any], generate: bool, tools: Tools) -> str:
        raise ValueError(
            f"the bare sentencepiece model in {self.directory} has no chat template: set data.chat_template: false"
        )


def _stop_ids(directory: Path, eos: int | None, model_stops: list[int]) -> tuple[int, ...]:
    stops = tuple(dict.fromkeys(([] if eos is None else [int(eos)]) + model_stops))
    if not stops:
        raise ValueError(
            f"the tokenizer in {directory} has no end token: name eos_token in tokenizer_config.json "
            f"or eos_token_id in generation_config.json"
        )
    return stops


def _model_stop_ids(directory: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, else of config.json: one id, a list, or none."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if stops is not None:
            return [int(stop) for stop in (stops if isinstance(stops, list) else [stops])]
    return []
