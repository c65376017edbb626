"""Tokens between two turns of the policy: messages of tools or of the user, as the chat template writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.agents.tool import ToolFault
from megarl.agents.toolbox import ToolAnswer
from megarl.data.images import ImageReader
from megarl.data.tokenizer import Tokenizer, UnreadParts
from megarl.types import Prompt, PromptImage, SampleImages

_CALL = {"id": "call_0", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
_TALK: list[list[dict[str, Any]]] = [  # conversations that end with a call; templates accept different ones
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    for content in (None, "")
    for call in (_CALL, {**_CALL, "function": {"name": "tool", "arguments": {}}})
]
_LONGEST_TOKEN = 64  # most characters of a token, runs of white space excepted
_TURN, _REPLY = "an-assistant-turn", "a-reply"
_PROBE = [{"role": "tool", "content": "answer", "name": "tool", "tool_call_id": "call_0"}]


class _Messages:
    """Messages between two turns of the policy, converted to tokens without rendering or tokenizing sampled text again."""

    def __init__(self, tokenizer: Tokenizer, template_args: dict[str, Any], most: int) -> None:
        """`most`: tokens of a message; the middle of a longer one is cut out."""
        self.tokenizer, self.args, self.most = tokenizer, template_args, most

    def shown(self, text: str) -> str:
        """Return `text` as the policy sees it: at most `most` tokens, none of them a special token.

        A space breaks up special tokens in the text (<|im_end|>, </tool_response>), so that a tool cannot fake a turn.
        """
        reach = self.most * _LONGEST_TOKEN
        if len(text) > 2 * reach:  # the middle is cut out anyway, and a megabyte takes seconds to tokenize
            shown, last = self._harmless(text[:reach]), self._harmless(text[-reach:])
            return self._cut(self.tokenizer.encode(shown), self.tokenizer.encode(last), text)
        shown = self._harmless(text)
        ids = self.tokenizer.encode(shown)
        return shown if len(ids) <= self.most else self._cut(ids, ids, text)

    def _cut(self, beginning: list[int], end: list[int], text: str) -> str:
        half = self.most // 2
        first, last = (self.tokenizer.decode(part).strip("\ufffd") for part in (beginning[:half], end[-half:]))
        left_out = max(len(text) - len(first) - len(last), 0)
        return self._harmless(f"{first}\n[{left_out} characters are left out here]\n{last}")

    def _harmless(self, text: str) -> str:
        """Break up special tokens, and replace half surrogate pairs, which tokenizers reject."""
        return self.tokenizer.break_added_tokens(text.encode("utf-8", "replace").decode())

    def _render(self, messages: Sequence[dict[str, Any]], generate: bool) -> str:
        return self.tokenizer.render_text(messages, True, self.args, generate)


class AnswerTokens(_Messages):
    """Converts tool messages to tokens.

    The chat template renders a short conversation with a call, once without and once with tool messages. The difference,
    from the end token of the policy's turn on, is the text between two turns.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_args: dict[str, Any], most: int, images: ImageReader | None = None
    ) -> None:
        """`most`: tokens of an answer's text. `images`: reader of answers' images; None: answers have none.

        Raises:
            ValueError: the chat template cannot append tool messages to a conversation.
        """
        super().__init__(tokenizer, template_args, most)
        self._images = images
        self._talk, self._rest = self._find_talk()

    def tokens(self, answers: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens from the end token of the calling turn to the head of the policy's next turn.

        `answers`: (tool name, text) of each tool message.
        """
        return self._encode(answers)

    def with_images(
        self, answers: Sequence[tuple[str, str]], images: Sequence[Sequence[PromptImage]]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens as `tokens` does, and the images of all answers, with starts relative to these tokens.

        `images`: of each answer; they come before its text.

        Raises:
            ValueError: the chat template does not write one placeholder for each image.
        """
        ids = np.array(self._encode(answers, [len(answer_images) for answer_images in images]))
        flat = [image for answer_images in images for image in answer_images]
        if not flat:
            return ids.tolist(), ()
        assert self._images is not None, "images were read"
        places = np.flatnonzero(ids == self._images.token)
        if len(places) != len(flat):
            raise ValueError(
                f"the chat template in {self.tokenizer.directory} writes {len(places)} placeholders (token {self._images.token}) for "
                f"{len(flat)} images in tool messages: use a template that writes images of the role `tool`, as Qwen3-VL's does"
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [image.tokens for image in flat]
        starts = (np.cumsum(counts) - counts)[places].tolist()
        placed = tuple(replace(image, start=start) for image, start in zip(flat, starts, strict=True))
        return ids.repeat(counts).tolist(), placed

    def prepare(self, images: tuple[PromptImage, ...]) -> SampleImages | None:
        """Decode the images of `with_images`; None for none. Raises ToolFault for a damaged one."""
        try:
            return self._images.prepare(Prompt("", (), "", "", images=images)) if self._images is not None else None
        except ValueError as error:
            raise _fault("an answer has images", error) from error

    @property
    def writes_images(self) -> bool:
        """True if the chat template writes a placeholder for an image of a tool message."""
        assert self._images is not None, "the model reads images"
        try:
            return self._encode([("tool", "answer")], [1]).count(self._images.token) == 1
        except UnreadParts:
            return False

    def read(self, answer: ToolAnswer) -> tuple[PromptImage, ...]:
        """Return the images of an answer. Raises ToolFault for one that cannot be read."""
        name = answer.turn.name
        try:
            if answer.images and self._images is None:
                raise ValueError("the model reads no images")
            return tuple(
                self._images.encoded(image, f"image {number} of the answer of tool {name!r}")
                for number, image in enumerate(answer.images)
                if self._images is not None
            )
        except ValueError as error:
            raise _fault("its answer has images", error, f"tool {name!r}") from error

    def _encode(self, answers: Sequence[tuple[str, str]], images: Sequence[int] = ()) -> list[int]:
        """Return the tokens, with one placeholder for each image. `images`: number of each answer's."""
        contents = [
            [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}] if count else text
            for (_, text), count in zip(answers, images or [0] * len(answers), strict=True)
        ]
        messages: list[dict[str, Any]] = [
            {"role": "tool", "content": content, "name": self._harmless(name), "tool_call_id": f"call_{number}"}
            for number, ((name, _), content) in enumerate(zip(answers, contents, strict=True))
        ]
        talk = _calling(self._talk, messages[0]["name"])
        before, whole = self._render(talk, generate=False), self._render([*talk, *messages], generate=True)
        if not whole.startswith(before):
            raise ValueError(
                f"the chat template in {self.tokenizer.directory} changes earlier text when {messages} follow"
            )
        return self.tokenizer.encode(self._rest + whole[len(before) :])

    def _find_talk(self) -> tuple[list[dict[str, Any]], str]:
        """Return a conversation that the template can continue, and the text after its last end token."""
        problem = ""
        for talk in _TALK:
            try:
                before, whole = self._render(talk, generate=False), self._render([*talk, *_PROBE], generate=True)
            except ValueError as error:
                problem = problem or str(error)
                continue
            if whole.startswith(before) and "answer" in whole[len(before) :]:
                return talk, self._after_last_end(before)
        raise ValueError(
            f"the chat template in {self.tokenizer.directory} cannot append a tool message to a conversation"
            f"{': ' + problem if problem else ''}. Use a template for tools (role `tool`)"
        )

    def _after_last_end(self, before: str) -> str:
        ids = self.tokenizer.encode(before)
        ends = [place for place, number in enumerate(ids) if number in self.tokenizer.end_ids]
        rest = self.tokenizer.decode(ids[ends[-1] + 1 :]) if ends else before
        if not ends or rest.strip():
            raise ValueError(
                f"the chat template in {self.tokenizer.directory} closes a turn that calls a tool with no special token: {rest!r} comes "
                "after the last one, and the policy would read it after each of its calls. Use a template that ends an assistant's "
                "turn with a token at which engines stop (data.chat_template)"
            )
        assert before.endswith(rest), (before, rest)
        return rest


def _fault(problem: str, error: ValueError, source: str = "tools") -> ToolFault:
    fault = ToolFault(f"{problem}: {error}")
    fault.source = source
    return fault


def _calling(talk: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the conversation with a call of the tool `name`: gpt-oss's template takes the name of a tool message from there."""
    *before, turn = talk
    (call,) = turn["tool_calls"]
    return [*before, {**turn, "tool_calls": [{**call, "function": {**call["function"], "name": name}}]}]


class ReplyTokens(_Messages):
    """Converts a user's reply to tokens: what the chat template writes between the end token of the assistant's turn and the head of
    the next one. The text before that end token may change with the reply, as Qwen3's does; it is not used."""

    def __init__(self, tokenizer: Tokenizer, template_args: dict[str, Any], most: int) -> None:
        """`most`: tokens of a reply.

        Raises:
            ValueError: the chat template cannot append a user's message after an assistant's.
        """
        super().__init__(tokenizer, template_args, most)
        try:
            text = tokenizer.decode(self.tokens(_REPLY))
        except ValueError as error:
            raise ValueError(f"{error}. agent.interaction needs a template for several turns") from error
        if _REPLY not in text:
            raise ValueError(
                f"the chat template in {tokenizer.directory} leaves a user's message after an assistant's out; "
                "agent.interaction needs a template for several turns"
            )

    def tokens(self, text: str) -> list[int]:
        """Return the tokens from the end token of the policy's turn, without it, to the head of the next turn."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        whole = self._render([*talk, {"role": "user", "content": text}], generate=True)
        _, turn, after = whole.partition(_TURN)
        ids = self.tokenizer.encode(after)
        end = next((place for place, number in enumerate(ids) if number in self.tokenizer.end_ids), None)
        if not turn or end is None:
            raise ValueError(
                f"the chat template in {self.tokenizer.directory} closes an assistant's turn before a user's with no end token"
            )
        return ids[end + 1 :]
