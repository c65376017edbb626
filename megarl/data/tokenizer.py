"""Tokenizers, loaded from a Hugging Face tokenizer directory or a bare sentencepiece ``tokenizer.model``."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megarl.data import auto_tokenizer
from megarl.data.chat_template import is_text, resolve
from megarl.errors import cut_end
from megarl.hf import hub
from megarl.hf.config import text_fields
from megarl.hf.families.read import config_of_unknown_type

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class UnreadParts(ValueError):
    """A chat template does not read a content that is a list of parts: text, images, videos."""


class Tokenizer(ABC):
    """Interface of all tokenizers.

    Attributes:
        directory: directory it was loaded from.
        vocab_size: largest id + 1.
        eos_id: the token that ends a response.
        stop_ids: all tokens that end generation: `eos_id`, then the others in the model's generation_config.json.
        bos_ids: ids in front of plain text, () or (bos,). A chat template writes them itself.
        end_ids: all tokens that may end a turn of a chat template: the special tokens and `stop_ids`.
        chat_template: the tokenizer's chat template, None if it has none.
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
        """Return the ids of each text, without added special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; special tokens are dropped unless `special`."""

    @abstractmethod
    def tokens(self) -> dict[str, int]:
        """Return the vocabulary: token string -> id."""

    @abstractmethod
    def apply_chat_template(self, messages: Messages, args: dict[str, Any], generate: bool, tools: Tools) -> str:
        """Render `messages` with the chat template; `generate` appends the generation prompt."""

    def added_tokens(self) -> frozenset[str]:
        """Return the added tokens, special or not: strings that always encode to a single token."""
        return frozenset()

    def break_added_tokens(self, text: str) -> str:
        """Return `text` with a space inserted into every added token.

        Untrusted text can then not end a turn with <|im_end|> and continue in another role.
        """
        added = sorted(self.added_tokens(), key=len, reverse=True)
        pattern = "|".join(re.escape(token) for token in added if len(token) > 1)
        return re.sub(pattern, lambda match: f"{match[0][0]} {match[0][1:]}", text) if pattern else text

    def today(self) -> str:
        """Return the date if the chat template writes it, else "". Rendered text then changes from day to day."""
        return ""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without added special tokens."""
        return self.encode_batch([text])[0]

    def render_text(
        self,
        messages: Messages,
        chat_template: bool,
        args: dict[str, Any] | None = None,
        generate: bool = True,
        tools: Tools = (),
    ) -> str:
        """Render `messages` to one text with the chat template, or concatenate their contents.

        Raises:
            ValueError: the chat template is missing, rejects the messages, or does not read an argument or `tools`. Without
                a template: a content is not text, or the row has tools, tool calls or template arguments.
        """
        if chat_template:
            return self.apply_chat_template(messages, args or {}, generate, tools)
        if tools or any(message.get("tool_calls") for message in messages):
            raise ValueError("tools and tool calls need a chat template: set data.chat_template: true")
        if args:
            raise ValueError(f"data.chat_template_args {args} need data.chat_template: true")
        for message in messages:
            if not isinstance(message["content"], str):
                raise ValueError(
                    f"without a chat template a message's content must be text, not {message['content']!r}"
                )
        return "".join(message["content"] for message in messages)

    def leading_ids(self, chat_template: bool) -> list[int]:
        """Return the ids to put in front of a rendered text."""
        return [] if chat_template else list(self.bos_ids)


def load_tokenizer(
    directory: str | Path, model_directory: str | Path | None = None, chat_template: bool | str = True
) -> Tokenizer:
    """Load the tokenizer in `directory`; no code from the directory is run.

    `chat_template`: the value of `data.chat_template`; a text or a name replaces the tokenizer's template.
    A Hugging Face tokenizer has precedence over a bare sentencepiece ``tokenizer.model``. The model's stop tokens are
    read from generation_config.json (else config.json) in `model_directory`, by default the same directory. A tokenizer of the
    hub is fetched if this node lacks it (`hub.local_model`).

    Raises:
        ValueError: the directory has no readable tokenizer, or the tokenizer has no end token, or cannot have that template.
    """
    directory = Path(hub.local_model(str(directory), weights=False))
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: a tokenizer is a local Hugging Face directory")
    model_stops = _model_stop_ids(Path(hub.local_model(str(model_directory or directory), weights=False)))
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return HuggingFaceTokenizer(directory, model_stops, chat_template if isinstance(chat_template, str) else None)
    if (directory / "tokenizer.model").is_file():
        if isinstance(chat_template, str):
            raise ValueError(
                f"data.chat_template: the bare sentencepiece model in {directory} can have no template: set false"
            )
        return SentencePieceTokenizer(directory, model_stops)
    files = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
    raise ValueError(
        f"{directory} has no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model), but {files}"
    )


def template_text(chat_template: bool | str, directory: str) -> str | None:
    """Return the text of a template that `data.chat_template` sets for the tokenizer in `directory`; None if it sets none."""
    if isinstance(chat_template, bool) or is_text(chat_template):
        return chat_template if isinstance(chat_template, str) else None
    return str(load_tokenizer(directory, chat_template=chat_template).chat_template)


def turn_end_notice(tokenizer: Tokenizer) -> str | None:
    """Return a notice if the chat template ends answers with a token at which engines do not stop."""
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        ids = tokenizer.encode(tokenizer.apply_chat_template(talk, {}, False, ()))
    except ValueError:
        return None  # rows show whether the template fits them
    ends = [number for number in ids if number in tokenizer.end_ids]
    if not ends or ends[-1] in tokenizer.stop_ids:
        return None
    end, stops = (tokenizer.decode(tokens, special=True) for tokens in (ends[-1:], tokenizer.stop_ids))
    return (
        f"data.chat_template ends answers with {end!r}, but engines stop at {stops!r}: add {ends[-1]} to eos_token_id in the "
        "model's generation_config.json if the model is to stop there"
    )


def unread_arguments(chat_template: Any, args: Iterable[str]) -> list[str]:
    """Return the `args` that the template never reads. Templates ignore unknown arguments, so a typo would have no effect."""
    return [name for name in args if not re.search(rf"\b{re.escape(name)}\b", str(chat_template))]


def check_vocabulary(tokenizer: Tokenizer, hf_config: dict[str, Any]) -> None:
    """Check that the model has an embedding for every id of the tokenizer.

    `hf_config`: the model's config.json, with or without a section for the text model.

    Raises:
        ValueError: the tokenizer's largest id is outside the model's vocabulary.
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
    """Check that every token of `tokenizer` has the same id in `other`, which may have more tokens.

    Raises:
        ValueError: names the first token that differs.
    """
    other_ids = other.tokens()
    for token, token_id in sorted(tokenizer.tokens().items(), key=lambda item: item[1]):
        if other_ids.get(token) != token_id:
            difference = "is missing from" if token not in other_ids else f"has id {other_ids[token]} in"
            raise ValueError(
                f"the tokenizers in {tokenizer.directory} and {other.directory} differ: {token!r} has id {token_id} in the "
                f"former and {difference} the latter. The models need the same token ids: choose models of one family"
            )


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer loaded by transformers."""

    def __init__(self, directory: Path, model_stops: list[int], chat_template: str | None = None) -> None:
        """`chat_template`: text or name of a template instead of the tokenizer's."""
        self.directory = directory
        try:
            self._hf = auto_tokenizer.load(str(directory), lambda: config_of_unknown_type(directory))
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ValueError(f"{directory}: transformers cannot load the tokenizer: {error}") from error
        if self._hf.is_fast:  # truncation and padding in tokenizer.json are meant for inference
            self._hf.backend_tokenizer.no_truncation()
            self._hf.backend_tokenizer.no_padding()
        if chat_template is not None:
            self._hf.chat_template = resolve(chat_template, self._hf.chat_template, self.added_tokens())
        self.chat_template = self._hf.chat_template
        self.vocab_size = max(self._hf.get_vocab().values()) + 1
        self.stop_ids = _stop_ids(directory, self._hf.eos_token_id, model_stops)
        self.eos_id = self.stop_ids[0]
        special = {number for number, token in self._hf.added_tokens_decoder.items() if token.special}
        self.end_ids = frozenset(special | set(self.stop_ids))
        bos = self._hf.bos_token_id
        if bos is not None and self._hf("")["input_ids"][:1] == [bos]:
            self.bos_ids = (int(bos),)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers, for agent loops of verl."""
        return self._hf

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._hf.is_fast:  # avoids transformers' copies of unused outputs
            encodings = self._hf.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
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
                f"the chat template in {self.directory} never reads the tools of a row: use another template"
            )
        for name in unread_arguments(template, args):
            raise ValueError(f"data.chat_template_args: the template in {self.directory} never reads {name!r}")
        try:
            text: str = self._hf.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate, **args
            )
        except Exception as error:  # a template may raise any exception
            raise ValueError(
                f"the chat template in {self.directory} rejects the messages {messages!r}: {error}"
            ) from error
        for message in messages:
            if fault := _unread_parts(message, text, is_last=message is messages[-1]):
                raise UnreadParts(
                    f"the chat template in {self.directory} does not read parts, and {fault}: write the content as text, or set a "
                    "template that reads parts (data.chat_template)"
                )
        return text


def _unread_parts(message: dict[str, Any], text: str, *, is_last: bool) -> str:
    """Return what a template did wrong with a content that is a list of parts; "" if it is right. text: what the template wrote."""
    content = message.get("content")
    if not isinstance(content, list) or not content:
        return ""
    parts = [part for part in content if isinstance(part, dict)]
    for raw in (content, *(part for part in parts if "text" in part)):
        written = next(
            (form for form in (str(raw), json.dumps(raw), json.dumps(raw, ensure_ascii=False)) if form in text), None
        )
        if written is not None:
            return f"writes a content as {cut_end(written, 80)}"
    if message.get("role") == "assistant" and not is_last:  # templates leave out thoughts of earlier turns
        return ""
    texts = [str(part.get("text") or "").rpartition("</think>")[2].strip() for part in parts]
    missing = next((part for part in texts if part not in text), None)
    return (
        ""
        if missing is None
        else f"leaves out the text {cut_end(repr(missing), 80)} of a message of the role {message.get('role')}"
    )


class SentencePieceTokenizer(Tokenizer):
    """A bare sentencepiece model. It does not specify a leading bos token, so plain text gets none."""

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
        skipped = frozenset() if special else self.end_ids | {self._model.pad_id()}  # pad_id is -1 if absent
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
    """Read `eos_token_id` (an id or a list) of generation_config.json, else of config.json; [] if neither has it."""
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
