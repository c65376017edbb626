"""Preferences: two answers to a prompt; only the answers are in the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.preferences import PreferenceDataset
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.recipe.schema import DataConfig, Recipe
from megarl.rollout.source_dataset import DatasetSource

PROMPT = [{"role": "user", "content": "2+2?"}]
TALK = [*PROMPT, {"role": "assistant", "content": "5"}, {"role": "user", "content": "No."}]


@pytest.fixture
def tokenizer(quickstart_data: Path) -> Tokenizer:
    return load_tokenizer(str(quickstart_data / "model"))


def build(
    folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], limit: int = 200, **more: Any
) -> PreferenceDataset:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceDataset([path], tokenizer, DataConfig(**more), limit)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("chat_template", [True, False])
def test_only_the_last_answer_is_in_the_loss_for_every_form_of_row(
    tmp_path: Path, tokenizer: Tokenizer, chat_template: bool
) -> None:
    rows = [
        {"prompt": TALK, "chosen": "4", "rejected": "22"},
        {"prompt": TALK, "chosen": [assistant("4")], "rejected": [assistant("22")]},
        {"chosen": [*TALK, assistant("4")], "rejected": [*TALK, assistant("22")]},
    ]
    pairs = list(build(tmp_path, tokenizer, rows, chat_template=chat_template))
    for chosen, rejected in pairs:
        for example, answer in ((chosen, "4"), (rejected, "22")):
            assert tokenizer.decode(example.tokens[example.loss_mask].tolist()) == answer
            assert example.text == answer
        prompt = chosen.prompt_length
        np.testing.assert_array_equal(chosen.tokens[:prompt], rejected.tokens[:prompt])
        assert "5" in tokenizer.decode(chosen.tokens[:prompt].tolist())
    for other in pairs[1:]:
        for first, same in zip(pairs[0], other, strict=True):
            np.testing.assert_array_equal(first.tokens, same.tokens)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a?", "chosen": "b", "rejected": "b"}, "the same answer"),
        ({"chosen": [*TALK, assistant("4")], "rejected": [*PROMPT, assistant("4")]}, "do not answer the same prompt"),
        ({"chosen": [assistant("4")], "rejected": "5"}, "'prompt' is empty"),
        ({"prompt": "a?", "chosen": [*TALK], "rejected": "5"}, "must end with the assistant's answer"),
        ({"prompt": "a?", "chosen": "b"}, "no column 'rejected'"),
    ],
)
def test_invalid_preference_rows_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build(tmp_path, tokenizer, [row])


def test_a_pair_with_one_overlong_answer_is_omitted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a?", "chosen": "b", "rejected": "c" * 300}, {"prompt": "a?", "chosen": "b", "rejected": "c"}]
    pairs = build(tmp_path, tokenizer, rows, limit=40, overlong_prompts="filter")
    assert (len(pairs), pairs.filtered) == (1, 1)
    with pytest.raises(ValueError, match="pairs have an answer that is longer"):
        build(tmp_path, tokenizer, rows, limit=40)


def test_a_pair_is_a_group_with_the_chosen_answer_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n} no"} for n in range(3)]
    recipe = Recipe()
    recipe.data.shuffle = False
    source = DatasetSource(recipe, build(tmp_path, tokenizer, rows))
    source.admit(4)
    groups = source.take(3).groups
    for number, group in enumerate(groups):
        vectors = group.samples[0].data.get()
        assert [vector.text for vector in vectors] == [f"yes {number}", f"no {number} no"]
        assert [sample.index for sample in group.samples] == [0, 1] and [
            sample.version for sample in group.samples
        ] == [4, 4]
        for sample, vector in zip(group.samples, vectors, strict=True):
            assert sample.length == len(vector.tokens) and sample.loss_tokens == vector.loss_mask.sum()
