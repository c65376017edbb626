"""Properties of templates and masks: the loss tokens decode to exactly the assistant's turns."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.commands.data.tiny_tokenizer import CHAT_TEMPLATE, make_tiny_tokenizer
from megarl.data import Tokenizer, load_tokenizer
from megarl.data.cache import Encoded
from megarl.data.prompts import encode_prompts
from megarl.data.rows import Row
from megarl.data.sft import encode_demonstrations
from megarl.recipe.schema import DataConfig

# Like Qwen2.5: a default system turn, and roles and contents unchanged.
WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)
# Qwen3's: thinking is switched off by an empty thought, which the prompt holds.
WITHOUT_THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES = {"plain": CHAT_TEMPLATE, "with_system": WITH_SYSTEM, "without_thinking": WITHOUT_THINKING}

# Random text, biased to strings that templates and tokenizers treat specially. Special tokens in contents are excluded: a
# tokenizer cannot distinguish them from the template's.
pieces = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.sampled_from(
        [" ", "\n", "  \n\n", "assistant", "user\n", "<think>", "12,345", "四🙂", "<|im_", "end|>", "{{ x }}", "\u2581"]
    ),
)
texts = st.lists(pieces, max_size=6).map("".join).filter(lambda text: "<|im_" not in text or "|>" not in text)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    talk = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        talk += [{"role": "user", "content": draw(texts)}, {"role": "assistant", "content": draw(texts)}]
    if draw(st.booleans()):
        talk.append({"role": "user", "content": draw(texts)})
    return talk


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    tokenizers_by_name = {}
    for name, template in TEMPLATES.items():
        out = tmp_path_factory.mktemp(name)
        make_tiny_tokenizer(out)
        path = out / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        tokenizers_by_name[name] = load_tokenizer(out)
    return tokenizers_by_name


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    lines = [f"what is {a} plus {b}? the answer is {a + b}." for a in range(20) for b in range(20)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=300, byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("sentencepiece")
    (out / "tokenizer.model").write_bytes(model.getvalue())
    return load_tokenizer(out)


def encode(talk: list[dict[str, Any]], tokenizer: Tokenizer, config: DataConfig) -> Encoded:
    return encode_demonstrations([Row("row 0", {"messages": talk})], tokenizer, config)[0]


def runs(encoded: Encoded) -> list[list[int]]:
    """The stretches of tokens that the loss counts."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask, [0]])))
    return [encoded.tokens[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]


def assistant_turns(talk: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in talk if message["role"] == "assistant"]


@settings(max_examples=150, deadline=None)
@given(talk=conversations(), template=st.sampled_from(sorted(TEMPLATES)))
def test_the_mask_covers_exactly_the_assistants_turns(
    tokenizers: dict[str, Tokenizer], talk: list[dict[str, str]], template: str
) -> None:
    """A mask that is off by a token trains on the template's words, or leaves out the end that stops an answer."""
    tokenizer, config = tokenizers[template], DataConfig()
    encoded = encode(talk, tokenizer, config)
    learned = runs(encoded)
    assert [tokenizer.decode(run) for run in learned] == assistant_turns(talk)
    assert all(run[-1] == tokenizer.eos_id and run.count(tokenizer.eos_id) == 1 for run in learned)
    # Everything together is the template's text, so nothing between the turns is lost or doubled either.
    last = max(number for number, message in enumerate(talk) if message["role"] == "assistant")
    whole = tokenizer.render_text(talk[: last + 1], True, generate=False)
    assert tokenizer.decode(encoded.tokens.tolist()) == tokenizer.decode(tokenizer.encode(whole.removesuffix("\n")))


@settings(max_examples=100, deadline=None)
@given(talk=conversations(), template=st.sampled_from(sorted(TEMPLATES)))
def test_a_demonstration_begins_with_the_sampled_prompts_tokens(
    tokenizers: dict[str, Tokenizer], talk: list[dict[str, str]], template: str
) -> None:
    """Other ids in training than in sampling would teach the model to answer a prompt that it never sees."""
    tokenizer, config = tokenizers[template], DataConfig()
    first = next(number for number, message in enumerate(talk) if message["role"] == "assistant")
    prompt = encode_prompts([Row("row 0", {"prompt": talk[:first]})], tokenizer, config)[0]
    tokens = encode(talk[: first + 1], tokenizer, config).tokens
    np.testing.assert_array_equal(tokens[: len(prompt.tokens)], prompt.tokens)
    assert not prompt.loss_mask.any()


@settings(max_examples=150, deadline=None)
@given(talk=conversations())
def test_a_bare_sentencepiece_model(sentencepiece: Tokenizer, talk: list[dict[str, str]]) -> None:
    encoded = encode(talk, sentencepiece, DataConfig(chat_template=False))
    learned = runs(encoded)
    # Adjacent turns form one stretch only if nothing separates them, as with an empty question here.
    together = "".join(text + "|" for text in assistant_turns(talk))
    assistant_text = "".join(
        "".join(sentencepiece.decode(part) + "|" for part in split_after(run, sentencepiece.eos_id)) for run in learned
    )
    assert assistant_text.replace("\u2581", " ") == together.replace(
        "\u2581", " "
    )  # sentencepiece's own sign for a space
    assert learned[-1][-1] == sentencepiece.eos_id


def split_after(ids: list[int], end: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        parts[-1].append(token)
        if token == end:
            parts.append([])
    return parts[:-1]


def test_a_normalizing_sentencepiece_model_keeps_plain_answers(tmp_path: Path) -> None:
    """The usual training options add a space in front and fold widths; a plain answer still round-trips."""
    import sentencepiece

    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        model = io.BytesIO()
        lines = [f"what is {a} plus {b}? the answer is {a + b}." for a in range(20) for b in range(20)]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=300, byte_fallback=True, minloglevel=2
        )
        (Path(folder) / "tokenizer.model").write_bytes(model.getvalue())
        tokenizer = load_tokenizer(folder)
        talk = [{"role": "user", "content": "3 plus 4?"}, {"role": "assistant", "content": "the answer is 7."}]
        encoded = encode(talk, tokenizer, DataConfig(chat_template=False))
        assert tokenizer.decode(encoded.tokens[encoded.loss_mask].tolist()) == "the answer is 7."
