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

    Decodes each token a few times, however many steps there are; but for ends in bytes that make no text, where beginnings
    of the response are compared as a whole.
    """
    reader = _Reader(tokens, text, decode)
    return [reader.find(end) for end in ends]


class _Reader:
    """Knows that the first `_read` tokens are the first `_characters` of the text.

    A tokenizer may treat the first tokens that it is given differently (some drop leading spaces), so tokens are decoded
    together with the piece before them, whose own text, which is not empty, is then cut off.
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
        # Some tokenizers turn a whole run of bytes into replacement characters where it ends within a character.
        wholes = (self._decode(self._tokens[:stop]) for stop in range(self._read + 1, len(self._tokens)))
        found = (place for place, whole in enumerate(wholes, self._read) if whole[:end] == self._text[:end])
        return next(found, len(self._tokens) - 1)

    def _piece(self, stop: int) -> str:
        """The text of the tokens from `_read` to `stop`."""
        return self._decode(self._tokens[self._from : stop])[self._before :]

    def _fits(self, piece: str) -> bool:
        return bool(piece) and self._text.startswith(piece, self._characters)

    def _take(self, stop: int, piece: str) -> None:
        alone = len(self._decode(self._tokens[self._read : stop]))
        if alone:
            self._from, self._before = self._read, alone
        else:
            self._before += len(piece)
        self._read = min(stop, len(self._tokens))
        self._characters += len(piece)
