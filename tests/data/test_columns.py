"""`data.columns`: files with other names of columns, fields of columns, plain answers, and objects as JSON text."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.checkpoint.identity import data_digest
from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import PromptDataset, load_tokenizer
from megarl.data.cache import key_of
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import COLUMNS as PROMPT_COLUMNS
from megarl.data.rows import iterate_rows, sample_rows, write_parquet
from megarl.data.sft import SFTDataset
from megarl.errors import RecipeError
from megarl.preflight.recipe.data import COLUMNS
from megarl.recipe.schema import DataConfig

ROWS = [
    {
        "question": f"{number}+2?",
        "answer": str(number + 2),
        "origin": "openai/gsm8k",
        "info": {"index": number, "solution": f"so #### {number + 2}"},
    }
    for number in range(5)
]
NAMES = {"prompt": "question", "ground_truth": "answer", "data_source": "origin", "extra_info": "info"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(out)
    return load_tokenizer(out)


@pytest.fixture(params=["rows.parquet", "rows.jsonl"])
def file(request, tmp_path):
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        write_parquet(path, ROWS)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_prompts_have_the_columns_under_their_names(file, tokenizer):
    prompts = PromptDataset([file], tokenizer, DataConfig(columns=NAMES))
    assert [(p.question, p.ground_truth, p.data_source, p.uid) for p in prompts] == [
        (f"{number}+2?", str(number + 2), "openai/gsm8k", f"openai/gsm8k/{number}") for number in range(5)
    ]
    assert prompts[4].extra_info == ROWS[4]["info"]


def test_a_sample_has_the_same_rows(file):
    layout = ("prompt", "data_source", "reward_model")
    rows, total = sample_rows(file, 2, layout, optional=("extra_info",), names=NAMES)
    assert total == 5 and [row.values["prompt"] for row in rows] == ["0+2?", "4+2?"]
    assert rows[1].values["reward_model"] == {"ground_truth": "6"}


def test_a_dot_reads_a_field(file, tokenizer):
    names = {"prompt": "question", "response": "info.solution"}
    examples = SFTDataset([file], tokenizer, DataConfig(columns=names), 100)
    assert [example.text for example in examples] == [f"so #### {number + 2}" for number in range(5)]


def test_a_named_prompt_counts_before_messages(tmp_path, tokenizer):
    """verl's first SFT trainer reads prompt and response of files that also have messages."""
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "from messages"}]
    write_parquet(tmp_path / "both.parquet", [{"question": "q", "answer": "from columns", "messages": turns}])
    for names, text in (
        ({"prompt": "question", "response": "answer"}, "from columns"),
        ({}, "from messages"),
        ({"messages": "messages"}, "from messages"),
    ):
        (example,) = SFTDataset([tmp_path / "both.parquet"], tokenizer, DataConfig(columns=names), 100)
        assert example.text == text, names


def test_a_row_may_lack_an_optional_column_but_not_every_row(tmp_path, tokenizer):
    rows = [{"prompt": "q", "response": "a", "functions": []}, {"prompt": "p", "response": "b"}]
    names = {"tools": "functions"}
    for part, path in ((rows, tmp_path / "some.jsonl"), (rows[1:], tmp_path / "none.jsonl")):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    assert len(SFTDataset([tmp_path / "some.jsonl"], tokenizer, DataConfig(columns=names), 100)) == 2
    with pytest.raises(ValueError, match=r"none\.jsonl: no column 'functions' \(data\.columns\.tools\)"):
        SFTDataset([tmp_path / "none.jsonl"], tokenizer, DataConfig(columns=names), 100)


def test_missing_columns_name_the_setting_that_renames_them(tmp_path, tokenizer):
    """A recipe can rename columns. `megarl data` reads files of other projects, and has no such setting."""
    write_parquet(tmp_path / "a.parquet", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError) as error:
        PromptDataset([tmp_path / "a.parquet"], tokenizer, DataConfig())
    message = str(error.value)
    assert "write data: {columns: {prompt: NAME, data_source: NAME, ground_truth: NAME}} in the recipe" in message
    assert "Rows without data_source need one scorer for all, as in reward: {function: gsm8k}" in message
    with pytest.raises(ValueError, match=r"write data: \{columns: \{ground_truth: NAME\}\}"):
        PromptDataset(
            [tmp_path / "a.parquet"], tokenizer, DataConfig(columns={"prompt": "question", "data_source": "answer"})
        )
    with pytest.raises(ValueError, match=r"write data: \{columns: \{prompt: NAME, response: NAME\}\}"):
        SFTDataset([tmp_path / "a.parquet"], tokenizer, DataConfig(), 100)
    with pytest.raises(ValueError, match=r"no column 'prompt'; it has question, answer$"):
        list(iterate_rows(tmp_path / "a.parquet", ("prompt",)))


def test_images_under_another_name(tmp_path, tokenizer):
    """The column is counted as images: a file name that does not exist is refused with its row."""
    row = {"prompt": "<image>q", "data_source": "s", "reward_model": {"ground_truth": "4"}, "picture": ["a.png"]}
    write_parquet(tmp_path / "a.parquet", [row])
    with pytest.raises(ValueError, match=r"a\.parquet, row 0 has images"):
        PromptDataset([tmp_path / "a.parquet"], tokenizer, DataConfig(columns={"images": "picture"}))


def test_pairs(tmp_path, tokenizer):
    write_parquet(tmp_path / "pairs.parquet", [{"q": "2+2?", "good": "4", "bad": "5"}])
    names = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    ((chosen, rejected),) = PreferenceDataset([tmp_path / "pairs.parquet"], tokenizer, DataConfig(columns=names), 100)
    assert (chosen.text, rejected.text) == ("4", "5")


@pytest.mark.parametrize(
    "names, message",
    [
        ({"prompt": "questoin"}, "no column 'questoin' (data.columns.prompt); it has question, answer, origin, info"),
        # an optional column that the recipe names must be there
        ({"images": "image"}, "no column 'image' (data.columns.images); it has"),
        ({"extra_info": "inof"}, "no column 'inof' (data.columns.extra_info)"),
        ({"ground_truth": "info.result"}, "column 'info' has no field 'info.result'; fields: index, solution"),
        ({"ground_truth": "answer.value"}, "column 'answer' has no field 'answer.value'; fields: none"),
    ],
)
def test_a_wrong_name_is_refused_with_the_file_and_its_columns(names, message, file, tokenizer):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        PromptDataset([file], tokenizer, DataConfig(columns=NAMES | names))
    assert str(file) in str(error.value)


def test_objects_may_be_json_text(tmp_path, tokenizer):
    row = {"prompt": "2+2?", "data_source": "s"}
    texts = {"reward_model": json.dumps({"ground_truth": "4"}), "extra_info": json.dumps({"index": 8})}
    write_parquet(tmp_path / "a.parquet", [row | texts])
    (prompt,) = PromptDataset([tmp_path / "a.parquet"], tokenizer, DataConfig())
    assert (prompt.ground_truth, prompt.extra_info, prompt.uid) == ("4", {"index": 8}, "s/8")
    write_parquet(tmp_path / "b.parquet", [row | texts | {"extra_info": ""}])
    assert PromptDataset([tmp_path / "b.parquet"], tokenizer, DataConfig())[0].extra_info == {}
    write_parquet(tmp_path / "c.parquet", [row | texts | {"extra_info": "{'index': 8}"}])
    with pytest.raises(ValueError, match=r"c\.parquet, row 0: column 'extra_info' is .* which is not JSON"):
        PromptDataset([tmp_path / "c.parquet"], tokenizer, DataConfig())
    write_parquet(tmp_path / "d.parquet", [{"ask": json.dumps({"text": "2+2?"}), "data_source": "s"}])
    names = {"prompt": "ask.text"}
    assert (
        PromptDataset([tmp_path / "d.parquet"], tokenizer, DataConfig(columns=names), needed=())[0].question == "2+2?"
    )


def test_other_names_are_other_data(file, tokenizer):
    config = DataConfig(train_files=[str(file)])
    other = dataclasses.replace(config, columns={"prompt": "answer"})
    assert key_of(file, "kind", tokenizer, config) != key_of(file, "kind", tokenizer, other)
    assert data_digest(config) != data_digest(other)


def test_the_recipes_columns_are_those_of_the_data_sets():
    def of(dataset):
        return {*dataset.optional, *(column for layout in dataset.layouts for column in layout)}

    assert {*COLUMNS["rollout"]} == {"prompt", "ground_truth", *PROMPT_COLUMNS}
    assert {*COLUMNS["sft"]} == of(SFTDataset)
    assert {*COLUMNS["preferences"]} == of(PreferenceDataset)


def test_a_column_is_a_name():
    with pytest.raises(RecipeError, match=r"data\.columns\.prompt"):
        load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml", ["data.columns={prompt: [a]}"])


def test_a_recipe_names_columns():
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml", ["data.columns.prompt=question"])
    assert recipe.data.columns == {"prompt": "question"}
