"""Demonstrations: the loss mask covers exactly the assistant's turns and their end tokens."""

import json

import numpy as np
import pytest

from megarl.commands.data.tiny_tokenizer import CHAT_TEMPLATE, make_tiny_tokenizer
from megarl.data import PromptDataset, SFTDataset, load_tokenizer
from megarl.recipe.schema import DataConfig

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "4+3=7.\n#### 7"},
]


def tokenizer_with(out, template=CHAT_TEMPLATE):
    make_tiny_tokenizer(out)
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return load_tokenizer(out)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"))


def build(tmp_path, tokenizer, rows, max_length=200, **settings):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SFTDataset([path], tokenizer, DataConfig(**settings), max_length)


def learned(tokenizer, example):
    """Return the text of each run of the mask, with special tokens as <id>."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask, [0]])))
    runs = [example.tokens[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return [tokenizer.decode(run[:-1]) + f"<{run[-1]}>" for run in runs]


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("response", [" 8*8=64. 4+64=68.\n#### 68", "四 🙂", "  two  spaces \n\n", "a", ""])
def test_the_mask_decodes_to_exactly_the_response(tmp_path, tokenizer, chat_template, response):
    rows = [{"prompt": "Question: 8*8+4?\nAnswer:", "response": response}]
    example = build(tmp_path, tokenizer, rows, chat_template=chat_template)[0]
    assert learned(tokenizer, example) == [f"{response}<2>"]
    assert example.text == response
    assert example.tokens.dtype == np.int32 and example.loss_mask.dtype == bool
    assert len(example.tokens) == len(example.loss_mask) and example.loss_mask[-1]


@pytest.mark.parametrize("chat_template", [True, False])
def test_the_prompt_has_the_tokens_of_sampling(tmp_path, tokenizer, chat_template):
    # Contents that would merge across the seams, were they tokenized in one piece or in other ones.
    prompt = [{"role": "system", "content": "How many app"}, {"role": "user", "content": "les does Ann ha"}]
    row = {"prompt": prompt, "response": "ve now", "data_source": "x", "reward_model": {"ground_truth": ""}}
    example = build(tmp_path, tokenizer, [row], chat_template=chat_template)[0]
    sampled = PromptDataset([tmp_path / "sft.jsonl"], tokenizer, DataConfig(chat_template=chat_template))[0]
    assert tuple(example.tokens[: example.prompt_length]) == sampled.tokens
    assert not example.loss_mask[: example.prompt_length].any() and example.loss_mask[example.prompt_length :].all()


def test_every_assistant_turn_is_in_the_loss(tmp_path, tokenizer):
    example = build(tmp_path, tokenizer, [{"messages": [*TALK, {"role": "user", "content": "Thanks."}]}])[0]
    assert learned(tokenizer, example) == ["4<2>", "4+3=7.\n#### 7<2>"]
    # Nothing of the conversation is lost or doubled on the way, up to the last token that counts.
    text = tokenizer.render_text(TALK, True, generate=False)
    assert example.tokens.tolist() == tokenizer.encode(text.rstrip("\n"))


def test_turns_without_a_template_end_with_the_end_token(tmp_path, tokenizer):
    example = build(tmp_path, tokenizer, [{"messages": TALK}], chat_template=False)[0]
    assert learned(tokenizer, example) == ["4<2>", "4+3=7.\n#### 7<2>"]
    assert tokenizer.decode(example.tokens) == "".join(turn["content"] for turn in TALK)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    forgetful = CHAT_TEMPLATE.replace(
        "{{ message.content or '' }}", "{{ message.content if loop.last or message.role != 'assistant' else '...' }}"
    )
    tokenizer = tokenizer_with(tmp_path / "tokenizer", forgetful)
    assert len(build(tmp_path, tokenizer, [{"messages": TALK[:3]}])) == 1
    with pytest.raises(ValueError, match="line 1: the chat template writes turn 2 differently"):
        build(tmp_path, tokenizer, [{"messages": TALK}])


def as_parts(talk):
    """Return the messages with contents as lists of parts; an answer has two."""
    texts = [[turn["content"][:1], turn["content"][1:]] for turn in talk]
    parts = [[{"type": "text", "text": text} for text in pieces if text] for pieces in texts]
    return [{**turn, "content": content} for turn, content in zip(talk, parts, strict=True)]


def test_contents_as_lists_of_parts(tmp_path, tokenizer):
    reads_parts = CHAT_TEMPLATE.replace(
        "{{ message.content or '' }}", "{% for part in message.content %}{{ part.text or part }}{% endfor %}"
    )
    example = build(tmp_path, tokenizer_with(tmp_path / "tokenizer", reads_parts), [{"messages": as_parts(TALK)}])[0]
    expected = build(tmp_path, tokenizer, [{"messages": TALK}])[0]
    assert example.text == expected.text == "44+3=7.\n#### 7"
    assert example.tokens.tolist() == expected.tokens.tolist()
    assert example.loss_mask.tolist() == expected.loss_mask.tolist()
    with pytest.raises(ValueError, match=r"line 1: .* does not read parts, and writes a content as \[\{'type': 'text'"):
        build(tmp_path, tokenizer, [{"messages": as_parts(TALK)}])
    writes_texts_alone = CHAT_TEMPLATE.replace(  # as Qwen3's does
        "{{ message.content or '' }}", "{{ message.content if message.content is string else '' }}"
    )
    with pytest.raises(
        ValueError, match=r"does not read parts, and leaves out the text '.*' of a message of the role (user|system)"
    ):
        build(tmp_path, tokenizer_with(tmp_path / "other", writes_texts_alone), [{"messages": as_parts(TALK)}])


def test_a_template_that_never_ends_a_turn_is_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHAT_TEMPLATE.replace("<|im_end|>", ""))
    with pytest.raises(ValueError, match=r"line 1: the chat template .* never learn to stop"):
        build(tmp_path, tokenizer, [{"prompt": "a", "response": "b"}])


def test_examples_past_the_limit_are_refused_or_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1", "response": "2" * n} for n in (5, 6, 7)]  # 1 + n + the end token
    kept = build(tmp_path, tokenizer, rows, max_length=8, chat_template=False, overlong_prompts="filter")
    assert [len(example.tokens) for example in kept] == [7, 8] and kept.filtered == 1
    assert [example.uid for example in kept] == ["sft/0", "sft/1"]
    with pytest.raises(ValueError, match=r"1 of 3 examples .*\(8 tokens\); the longest has 9 .*line 3"):
        build(tmp_path, tokenizer, rows, max_length=8, chat_template=False)
    with pytest.raises(ValueError, match="3 of 3 examples"):
        build(tmp_path, tokenizer, rows, max_length=3, chat_template=False, overlong_prompts="filter")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a"}, "no column 'messages', or 'response'"),
        ({"messages": TALK[:2]}, r"line 1: .* the roles are \['system', 'user'\]"),
        ({"messages": TALK[2:]}, r"line 1: .* the roles are \['assistant', 'user', 'assistant'\]"),
        ({"prompt": "a", "response": None}, "line 1: column 'response' is empty"),
        ({"prompt": "a", "response": 4}, "line 1: column 'response' is 4, not a str"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, tokenizer, [row])
