"""What stands between two turns of the policy: the answers of tools, as the chat template writes them, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.tokenizer import Tokenizer

_CALL = {"id": "call_0", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
_TALK: list[list[dict[str, Any]]] = [  # conversations that end with a call; templates differ in which they can write
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    for content in (None, "")
    for call in (_CALL, {**_CALL, "function": {"name": "tool", "arguments": {}}})
]
_LONGEST_TOKEN = 64  # characters that a token of an answer has at most, but for runs of white space
_PROBE = [{"role": "tool", "content": "answer", "name": "tool", "tool_call_id": "call_0"}]


class AnswerTokens:
    """Answers of tools to tokens, by themselves: nothing that was sampled is rendered or tokenised again.

    A chat template is made to write a short conversation with a call, once without and once with answers to it; what
    comes in addition, from the end token of the policy's turn on, is what stands between two turns.
    """

    def __init__(self, tokenizer: Tokenizer, template_args: dict[str, Any], most: int) -> None:
        """`most`: tokens of an answer; of a longer one the middle is left out.

        Raises:
            ValueError: the chat template cannot write answers of tools so that they follow what was before.
        """
        self.tokenizer, self.args, self.most = tokenizer, template_args, most
        self._talk, self._before, self._rest = self._find_talk()

    def tokens(self, answers: Sequence[tuple[str, str]]) -> list[int]:
        """From the (tool's name, text) of each answer to what follows the end token of the turn that called them, up to
        the head of the policy's next turn."""
        messages = [
            {"role": "tool", "content": text, "name": self._harmless(name), "tool_call_id": f"call_{number}"}
            for number, (name, text) in enumerate(answers)
        ]
        whole = self._render([*self._talk, *messages], generate=True)
        if not whole.startswith(self._before):
            raise ValueError(
                f"the chat template in {self.tokenizer.directory} writes what was before otherwise where {messages} follow"
            )
        return self.tokenizer.encode(self._rest + whole[len(self._before) :])

    def shown(self, text: str) -> str:
        """`text` as the policy is shown it: at most `most` tokens, and none that the tokenizer knows as one of its own
        (<|im_end|>, </tool_response>): these are broken up by a space, so that nobody can speak for somebody else."""
        reach = self.most * _LONGEST_TOKEN
        if len(text) > 2 * reach:  # nothing between is shown in any case, and a megabyte takes seconds to tokenise
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
        """Without the tokenizer's own tokens, and without half surrogate pairs, which no tokenizer takes."""
        return self.tokenizer.break_added_tokens(text.encode("utf-8", "replace").decode())

    def _find_talk(self) -> tuple[list[dict[str, Any]], str, str]:
        """A conversation that the template can go on from, its text, and what of it stands behind the last end token."""
        problem = ""
        for talk in _TALK:
            try:
                before, whole = self._render(talk, generate=False), self._render([*talk, *_PROBE], generate=True)
            except ValueError as error:
                problem = problem or str(error)
                continue
            if whole.startswith(before) and "answer" in whole[len(before) :]:
                return talk, before, self._behind_the_end(before)
        raise ValueError(
            f"the chat template in {self.tokenizer.directory} cannot write a tool's answer behind what was before"
            f"{': ' + problem if problem else ''}. Use a template for tools (role `tool`)"
        )

    def _behind_the_end(self, before: str) -> str:
        ids = self.tokenizer.encode(before)
        ends = [place for place, number in enumerate(ids) if number in self.tokenizer.end_ids]
        if not ends:
            raise ValueError(f"the chat template in {self.tokenizer.directory} closes a turn with no special token")
        rest = self.tokenizer.decode(ids[ends[-1] + 1 :])
        assert before.endswith(rest), (before, rest)
        return rest

    def _render(self, messages: Sequence[dict[str, Any]], generate: bool) -> str:
        return self.tokenizer.render_text(messages, True, self.args, generate)
