"""Several sets drawn by weight, and rows drawn by difficulty: functions of the position alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import PromptDataset, Sampler, SFTDataset, load_tokenizer
from megarl.data.dataset import sampler_of
from megarl.data.sampler import MixedSampler
from megarl.errors import RecipeError
from megarl.preflight.load import load_recipe
from megarl.recipe.data import MixedSet
from megarl.recipe.schema import DataConfig, Recipe
from megarl.rollout.source_dataset import DatasetSource

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def mixed(*weights: float, size: int = 10, shuffle: bool = False) -> MixedSampler:
    samplers = [Sampler(size, 0, shuffle, stream) for stream in range(len(weights))]
    return MixedSampler([f"set{n}" for n in range(len(weights))], samplers, list(weights))


def test_draws_of_two_sets_worked_by_hand() -> None:
    # Weights 1 and 3: due at 0.5, 1.5, ... and at 1/6, 3/6, 5/6, ...; a tie goes to the first set.
    sampler = mixed(1, 3)
    assert [sampler.at(position) // 10 for position in range(8)] == [1, 0, 1, 1, 1, 0, 1, 1]
    assert [sampler.at(position) % 10 for position in range(8)] == [0, 0, 1, 2, 3, 1, 4, 5]


weights_of_sets = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(deadline=None)
@given(weights_of_sets, st.integers(0, 3000), st.integers(1, 200))
def test_each_stretch_of_draws_has_the_sets_shares(weights: list[float], start: int, length: int) -> None:
    """A set that is drawn too often, or in bursts, is another mix than the recipe's."""
    sampler = mixed(*weights)
    drawn = Counter(sampler.at(position) // 10 for position in range(start, start + length))
    for number, weight in enumerate(weights):
        assert abs(drawn[number] - length * weight / sum(weights)) <= max(1, len(weights) - 1)


@settings(deadline=None)
@given(weights_of_sets, st.integers(0, 400))
def test_a_position_is_computed_without_earlier_ones(weights: list[float], position: int) -> None:
    """A resumed run continues each set with the row after its last one."""
    drawn: Counter[int] = Counter()
    walk = mixed(*weights)
    for earlier in range(position):
        drawn[walk.at(earlier) // 10] += 1
    number, row = divmod(mixed(*weights).at(position), 10)
    assert row == drawn[number] % 10


def test_one_set_has_the_samplers_order_and_each_set_a_different_order() -> None:
    plain = Sampler(10, 0, True)
    assert [mixed(2.5, shuffle=True).at(n) for n in range(30)] == [plain.at(n) for n in range(30)]
    first, second = ([Sampler(10, 0, True, stream).at(n) for n in range(10)] for stream in (0, 1))
    assert first != second and sorted(second) == list(range(10))


def test_rows_and_epochs_of_a_step_are_counted() -> None:
    sampler = mixed(1, 3, size=4)
    # Of positions 4 to 7 one is of the first set and three of the second, which by then has given 6 of its 4 rows.
    assert sampler.metrics(range(4, 8)) == {
        "data/rows/set0": 1.0,
        "data/epochs/set0": 0.5,
        "data/rows/set1": 3.0,
        "data/epochs/set1": 1.5,
    }
    assert sampler.metrics(reversed(range(4, 8))) == sampler.metrics(range(4, 8))
    assert sampler.metrics([]) == {}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_curriculum_goes_from_easy_to_hard_and_then_follows_shuffle(shuffle: bool) -> None:
    difficulty = np.array([3.0, 1.0, np.nan, 2.0, 1.0, 3.0])
    sampler = Sampler(6, 5, shuffle, difficulty=difficulty, curriculum_epochs=2)
    plain = Sampler(6, 5, shuffle)
    for epoch in (0, 1):
        order = [sampler.at(epoch * 6 + n) for n in range(6)]
        assert [set(order[:2]), order[2], set(order[3:5]), order[5]] == [{1, 4}, 3, {0, 5}, 2]
        ties = [row for row in (plain.at(epoch * 6 + n) for n in range(6)) if row in (1, 4)]
        assert order[:2] == ties
    assert [sampler.at(12 + n) for n in range(6)] == [plain.at(12 + n) for n in range(6)]
    forever = Sampler(6, 5, shuffle, difficulty=difficulty)
    assert forever.at(12 + 5) == 2 and {forever.at(12), forever.at(13)} == {1, 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(out)
    return load_tokenizer(out)


def write(path: Path, prompts: list[str], levels: list[Any] | None = None) -> str:
    rows = []
    for number, prompt in enumerate(prompts):
        info = {"index": number} | ({} if levels is None else {"level": levels[number]})
        rows.append({"prompt": prompt, "response": "r", "data_source": path.stem, "extra_info": info})
    path.write_text("".join(json.dumps(row | {"reward_model": {"ground_truth": "1"}}) + "\n" for row in rows))
    return str(path)


def test_a_run_draws_from_a_mix_and_resumes_at_its_position(tmp_path: Path, tokenizer: Any) -> None:
    recipe = Recipe()
    recipe.data.mix = {
        "easy": MixedSet([write(tmp_path / "a.jsonl", ["1", "2"]), write(tmp_path / "b.jsonl", ["3"])], 1),
        "hard": MixedSet([write(tmp_path / "c.jsonl", ["4", "5", "6", "7"])], 3),
    }
    files = {name: part.files for name, part in recipe.data.mix.items()}
    examples = SFTDataset(files, tokenizer, recipe.data, 100)
    assert examples.sets == {"easy": 3, "hard": 4}
    source = DatasetSource(recipe, examples)
    batches = [source.take(8) for _ in range(3)]
    for batch in batches:
        drawn = Counter(group.data_source for group in batch.groups)
        assert (drawn["a"] + drawn["b"], drawn["c"]) == (2, 6)
        assert (batch.metrics["data/rows/easy"], batch.metrics["data/rows/hard"]) == (2, 6)
    assert batches[2].metrics["data/epochs/easy"] == 2.0 and batches[2].metrics["data/epochs/hard"] == 4.5
    resumed = DatasetSource(recipe, examples)
    resumed.restore({"counters": {"consumed": 16}, "gathered": []})
    assert [group.prompt_uid for group in resumed.take(8).groups] == [group.prompt_uid for group in batches[2].groups]


def test_overlong_rows_are_counted_by_file(tmp_path: Path, tokenizer: Any) -> None:
    a = write(tmp_path / "a.jsonl", ["1", "2" * 9, "3" * 8])
    b = write(tmp_path / "b.jsonl", ["1", "2"])
    c = write(tmp_path / "c.jsonl", ["1" * 6])
    limit = {"chat_template": False, "max_prompt_length": 5}
    data = PromptDataset([a, b], tokenizer, DataConfig(**limit, overlong_prompts="filter"))
    assert data.filtered == 2 and data.too_long_by_file() == f"2 of 3 in {a}" and len(data) == 3
    with pytest.raises(ValueError, match=rf"3 of 6 prompts .*: 2 of 3 in {a}, 1 of 1 in {c}; the longest has 9 \({a}"):
        PromptDataset([a, b, c], tokenizer, DataConfig(**limit))
    with pytest.raises(ValueError, match=r"nothing is left of data.mix.two\. Raise the limit$"):
        PromptDataset({"one": [a], "two": [c]}, tokenizer, DataConfig(**limit, overlong_prompts="filter"))


def test_missing_difficulties_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    a = write(tmp_path / "a.jsonl", ["1", "2", "3"], [3, None, 1])
    config = DataConfig(chat_template=False, shuffle=False)
    data = PromptDataset([a], tokenizer, config, difficulty="level")
    assert [data[sampler_of(data, config, 0).at(n)].text for n in range(3)] == ["3", "1", "2"]
    assert data.notices == ["1 of 3 rows have no extra_info.level: each epoch draws them last"]
    with pytest.raises(ValueError, match="no row has a number 'steps' in extra_info, but index, level"):
        PromptDataset([a], tokenizer, config, difficulty="steps")
    b = write(tmp_path / "b.jsonl", ["1"], ["hard"])
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: .* extra_info.level, which is 'hard', not a number"):
        PromptDataset([b], tokenizer, config, difficulty="level")


MIX = "data.mix={a: {files: [x.parquet]}, b: {files: [y.jsonl], weight: 3}}"


def test_a_mix_in_a_recipe() -> None:
    recipe = load_recipe(RECIPE, ["data.train_files=[]", MIX, "data.mix.a.weight=2"])
    assert recipe.data.mix == {"a": MixedSet(["x.parquet"], 2.0), "b": MixedSet(["y.jsonl"], 3.0)}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([MIX], "data.train_files", "data.mix names the training sets"),
        (["data.train_files=[]", "data.mix={a: {files: []}}"], "data.mix", "a has no files"),
        (
            ["data.train_files=[]", "data.mix={a: {files: [x.jsonl], weight: 0}}"],
            "data.mix.a.weight",
            "must be above 0",
        ),
        (
            ["data.train_files=[]", "data.mix={a: {files: [x.jsonl], weight: .nan}}"],
            "data.mix.a.weight",
            "the value is NaN",
        ),
        (
            ["data.train_files=[]", "data.mix={b.c: {files: [x.jsonl], weight: -1}}"],
            "data.mix.b.c.weight",
            "must be above 0",
        ),
        (["data.train_files=[]", "data.mix={a/b: {files: [x.jsonl]}}"], "data.mix", "part of a metric name"),
        (
            ["data.train_files=[]", "data.mix={a: {file: [x.jsonl]}}"],
            "data.mix.a.file",
            "did you mean data.mix.a.files?",
        ),
        (["data.train_files=[]", "data.mix={a: {files: [x.csv]}}"], "data.mix.a.files", "neither .parquet nor .jsonl"),
        (["data.train_files=[x.csv]"], "data.train_files", "as docs/data.md shows"),
        (
            ["data.train_files=[openai/gsm8k/main/train]"],
            "data.train_files",
            "write hf://openai/gsm8k/main/train",
        ),
        (["data.curriculum_epochs=2"], "data.curriculum_epochs", "set data.curriculum"),
    ],
)
def test_an_invalid_mix_or_order_is_refused(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(RECIPE, overrides)
    assert raised.value.key == key and words in str(raised.value)
