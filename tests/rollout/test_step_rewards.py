"""Ends of steps, in characters, are mapped to the sampled tokens."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rollout.step_rewards import tokens_at


def byte_pairs(folder: Path) -> None:
    """Tokens are UTF-8 bytes: 0 to 255 are single bytes, 256 is the special token <end>, 257 is " " and the first two
    bytes of an emoji, 258 is its other two bytes and ".", 259 is "ab"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spell(text: bytes) -> str:
        return "".join(letters[byte] for byte in text)

    vocabulary = {spell(bytes([byte])): byte for byte in range(256)}
    vocabulary |= {"<end>": 256, spell(b" \xf0\x9f"): 257, spell(b"\x98\x80."): 258, "ab": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    _write(folder, tokenizer, end="<end>")


def byte_fallback(folder: Path) -> None:
    """A tokenizer like Llama 2's: words begin with a space, which the first word drops, and unknown characters become
    byte tokens, which decode to replacement characters if they are not valid text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["<end>", "▁", "▁a", "▁b", "a", "b", "."]
    vocabulary = {word: number for number, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    _write(folder, tokenizer, end="<end>")


def sentencepiece(folder: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    lines = [f"what is {a} plus {b}? the answer is {a + b}." for a in range(20) for b in range(20)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=300, byte_fallback=True, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def _write(folder: Path, tokenizer: object, end: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


KINDS = {
    "byte_pairs": byte_pairs,
    "byte_fallback": byte_fallback,
    "sentencepiece": sentencepiece,
    "tiny": make_tiny_tokenizer,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    built = {}
    for name, make in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        make(folder)
        built[name] = load_tokenizer(folder)
    return built


def places(tokenizer: Tokenizer, tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    return tokens_at(ends, tokens, tokenizer.decode(tokens), tokenizer.decode)


END, SPACE_AND_HALF, HALF_AND_DOT, AB = 256, 257, 258, 259


def test_an_end_within_a_token_maps_to_that_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokens = [AB, ord("c"), AB]  # abcab
    assert places(tokenizers["byte_pairs"], tokens, [1, 2, 3, 4, 5]) == [0, 0, 1, 2, 2]


def test_a_character_maps_to_the_token_of_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    """The first emoji ends at the last of its four tokens. The token with the second emoji's first bytes ends the
    space; the token with its last bytes ends the emoji and the "."."""
    tokenizer = tokenizers["byte_pairs"]
    tokens = [ord("x"), *"😀".encode(), SPACE_AND_HALF, HALF_AND_DOT]
    assert tokenizer.decode(tokens) == "x😀 😀."
    assert places(tokenizer, tokens, [1, 2, 3, 4, 5]) == [0, 4, 5, 6, 6]
    assert places(tokenizer, tokens, [4]) == [6], "earlier ends are not needed"


def test_a_step_never_ends_at_a_special_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokens = [END, ord("x"), END, END, *"é".encode(), END]
    assert places(tokenizers["byte_pairs"], tokens, [1, 2]) == [1, 5]


def test_an_incomplete_character_maps_to_its_first_byte(tokenizers: dict[str, Tokenizer]) -> None:
    """A response cut off within an emoji ends in a replacement character at its first byte."""
    tokenizer = tokenizers["byte_pairs"]
    tokens = [ord("x"), *"😀".encode()[:3]]
    assert tokenizer.decode(tokens) == "x�" and places(tokenizer, tokens, [1, 2]) == [0, 1]


def test_incomplete_byte_runs_map_to_the_completing_token(tokenizers: dict[str, Tokenizer]) -> None:
    """With byte fallback, the first byte of a second emoji invalidates the first emoji until the second is complete."""
    tokenizer = tokenizers["byte_fallback"]
    tokens = [2, *(7 + byte for byte in "😀😀".encode()), 3]  # the first word's space is dropped
    assert tokenizer.decode(tokens) == "a😀😀 b"
    assert places(tokenizer, tokens, [1, 2, 3, 4, 5]) == [0, 4, 8, 9, 9]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("name", KINDS)
def test_positions_equal_those_of_decoding_every_prefix(
    tokenizers: dict[str, Tokenizer], name: str, count: int
) -> None:
    """Compare with decoding every prefix of the response, for tokens in any order, many of them parts of characters.
    If bytes are not valid text, only the order of the replacement characters is checked."""
    tokenizer, random = tokenizers[name], np.random.default_rng(count)
    written = tokenizer.encode("a b ab.\n 4+64=68 naïve 四 🙂🙂") if name != "byte_fallback" else [2, 3, *range(7, 30)]
    common = random.choice(written, count)
    tokens = np.where(random.random(count) < 0.7, common, random.integers(0, tokenizer.vocab_size, count)).tolist()
    text = tokenizer.decode(tokens)
    beginnings = [tokenizer.decode(tokens[: stop + 1]) for stop in range(count)]
    positions = places(tokenizer, tokens, range(1, len(text) + 1))
    assert positions == sorted(positions)
    slow = {
        end: next(stop for stop, beginning in enumerate(beginnings) if beginning[:end] == text[:end])
        for end in range(1, len(text) + 1)
        if text[end - 1] != "�"
    }
    assert {end: positions[end - 1] for end in slow} == slow
    some = sorted(random.choice(list(slow), min(3, len(slow)), replace=False).tolist())
    assert places(tokenizer, tokens, some) == [slow[end] for end in some]


@pytest.mark.parametrize("name", ["tiny", "sentencepiece"])
def test_decoding_work_is_linear_in_the_response(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """The test includes a tokenizer that drops the spaces at the start of a piece."""
    tokenizer, decoded = tokenizers[name], 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return tokenizer.decode(tokens)

    (space,) = tokenizer.encode(" ") or [tokenizer._model.piece_to_id("▁")]  # type: ignore[attr-defined]
    tokens = [*tokenizer.encode("the answer is 7."), space, space, space] * 60
    text = tokenizer.decode(tokens)
    ends = [end for start in range(0, len(text) - 100, 200) for end in (start + 98, start + 99, start + 100)]
    positions = tokens_at(ends, tokens, text, decode)
    for place, end in zip(positions, ends, strict=True):
        assert len(tokenizer.decode(tokens[:place])) < end <= len(tokenizer.decode(tokens[: place + 1]))
    assert decoded < 20 * len(tokens)


def test_tokens_that_decode_only_together_are_handled() -> None:
    """With this tokenizer, tokens make text only together."""
    assert tokens_at([1, 3], [1, 2, 3], "xyz", lambda tokens: "xyz" if len(tokens) > 2 else "?") == [2, 2]
