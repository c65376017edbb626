"""Map the ends of steps from characters of a response to its sampled tokens.

The text is not tokenized again. The sampled tokens are decoded piece by piece, and the reader advances only if a piece's
text equals the response's text at that position. So a character that is split over several tokens ends at the last of
them, and special tokens add no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_JUMP = 64  # tokens decoded together where no step ends


def tokens_at(ends: Sequence[int], tokens: Sequence[int], text: str, decode: Decode) -> list[int]:
    """Return, for each of `ends` (increasing numbers of characters of `text`), the index of the token that completes
    these characters. `text` equals `decode(tokens)`.

    Each token is decoded a few times, whatever the number of steps. Exception: if an end lies within invalid bytes, whole
    prefixes of the response are decoded and compared.
    """
    reader = _Reader(tokens, text, decode)
    return [reader.find(end) for end in ends]


class _Reader:
    """Incremental decoder. The first `_read` tokens decode to the first `_characters` characters of the text.

    A tokenizer may decode the first tokens of a sequence differently (some drop leading spaces). So tokens are decoded
    together with the previous non-empty piece, and the text of that piece is cut off.
    """

    def __init__(self, tokens: Sequence[int], text: str, decode: Decode) -> None:
        self._tokens, self._text, self._decode = tokens, text, decode
        self._read = self._characters = 0
        self._from = 0  # first token of the previous piece
        self._before = 0  # characters of the previous piece's text

    def find(self, end: int) -> int:
        """Return the index of the token that completes the first `end` characters. `end` must increase in each call."""
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
            piece, expected = self._piece(stop), self._text[self._characters : end]
            if piece.startswith(expected):
                return stop - 1
            if self._fits(piece):
                self._take(stop, piece)
        # Some tokenizers decode a run of byte tokens to replacement characters until its last character is complete.
        prefixes = (self._decode(self._tokens[:stop]) for stop in range(self._read + 1, len(self._tokens)))
        matches = (index for index, prefix in enumerate(prefixes, self._read) if prefix[:end] == self._text[:end])
        return next(matches, len(self._tokens) - 1)

    def _piece(self, stop: int) -> str:
        """Return the text of the tokens from `_read` to `stop`."""
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
