"""Where steps of a response end: from characters of its text to the tokens that were sampled.

Nothing is tokenised again. The sampled tokens are decoded piece by piece, and a piece counts as far as it says what the
whole response says there: of a character that was split over tokens only the last of them makes it whole, and a special
token adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_JUMP = 64  # tokens that are decoded at once where no step ends


def tokens_at(ends: Sequence[int], tokens: Sequence[int], text: str, decode: Decode) -> list[int]:
    """For each of `ends`, increasing numbers of characters of `text`, the index of the token that completes the last of
    these characters. `text` is `decode` of `tokens`.

    Decodes each token a few times, however many steps there are. Raises ValueError where the tokens one after the other
    do not say what they say together.
    """
    reader = _Reader(tokens, text, decode)
    return [reader.find(end) for end in ends]


class _Reader:
    """Knows that the first `_read` tokens are the first `_characters` of the text.

    A tokenizer may treat the first token that it is given differently (some drop its leading space), so tokens are
    decoded together with the piece before them, whose own text is then cut off.
    """

    def __init__(self, tokens: Sequence[int], text: str, decode: Decode) -> None:
        self._tokens, self._text, self._decode = tokens, text, decode
        self._read = self._characters = 0
        self._from = 0  # first token of the piece before
        self._before = 0  # characters that it decodes to by itself

    def find(self, end: int) -> int:
        """Index of the token that completes the first `end` characters; `end` grows from call to call."""
        stop = next_jump = self._read
        while stop < len(self._tokens):
            if stop == self._read >= next_jump:
                next_jump = stop + _JUMP
                piece = self._piece(next_jump)
                if self._fits(piece) and self._characters + len(piece) < end:
                    self._take(next_jump, piece)
                    stop = self._read
                    continue
            stop += 1
            piece, wanted = self._piece(stop), self._text[self._characters : end]
            if piece.startswith(wanted):
                return stop - 1
            if self._fits(piece):
                self._take(stop, piece)
        raise ValueError(
            f"the {len(self._tokens)} tokens of a response say something else one after the other than together, from "
            f"character {self._characters} of {len(self._text)} on: with this tokenizer rewards of steps have no place"
        )

    def _piece(self, stop: int) -> str:
        """The text of the tokens from `_read` to `stop`."""
        return self._decode(self._tokens[self._from : stop])[self._before :]

    def _fits(self, piece: str) -> bool:
        return bool(piece) and self._text.startswith(piece, self._characters)

    def _take(self, stop: int, piece: str) -> None:
        self._from, self._read = self._read, min(stop, len(self._tokens))
        self._before = len(self._decode(self._tokens[self._from : stop]))
        self._characters += len(piece)
