"""Prompt rows are rendered, tokenized and named, and checked against the length limit."""

import json

import pytest

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import PromptDataset, load_tokenizer
from megarl.preflight.data import read_data
from megarl.recipe.schema import DataConfig, Recipe
from megarl.rewards.weighted import needed_columns


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(out)
    return load_tokenizer(out)


@pytest.fixture
def dataset(tokenizer, tmp_path):
    def build(rows, with_messages=False, posted=False, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return PromptDataset([path], tokenizer, DataConfig(**settings), with_messages=with_messages, posted=posted)

    return build


def row(prompt, index=None, **columns):
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": index, "split": "train"},
    } | columns


def test_messages_go_through_the_chat_template(dataset, tokenizer):
    prompts = dataset([row([{"role": "user", "content": "2+2?"}], index=17)])
    prompt = prompts[0]
    assert prompt.text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.question == "2+2?", "without the template's own"
    assert prompt.tokens == tuple(tokenizer.encode(prompt.text))
    assert (prompt.uid, prompt.data_source, prompt.ground_truth) == ("openai/gsm8k/17", "openai/gsm8k", "4")
    assert prompt.extra_info == {"index": 17, "split": "train"}


def test_messages_are_kept_for_scorers_that_read_them(dataset):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
    assert dataset([row(list(messages))], with_messages=True)[0].messages == messages
    assert dataset([row("2+2?")], with_messages=True)[0].messages == messages[1:]
    assert dataset([row(list(messages))])[0].messages == ()


def test_rows_without_a_ground_truth_among_others_have_a_notice(tokenizer, tmp_path):
    """A scorer of the user's own would get None for them. A source without any, as for a reward model, is as meant."""
    rows = [row("2+2?", 0), row("3+3?", 1) | {"reward_model": None}, row("1?", 2, data_source="x", reward_model=None)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    prompts = PromptDataset([path], tokenizer, DataConfig(), needed=())
    assert prompts.notices == [
        "1 of 2 rows of the data source 'openai/gsm8k' have no ground truth, the first is openai/gsm8k/1: their scorer gets None"
    ]


def test_plain_text_is_a_user_message_or_unchanged(dataset):
    messages = [{"role": "user", "content": "2+2?"}]
    assert dataset([row("2+2?")])[0] == dataset([row(messages)])[0]
    assert dataset([row("2+2?")], chat_template=False)[0].text == "2+2?"
    assert dataset([row(messages)], chat_template=False)[0].text == "2+2?"


def test_rows_keep_their_order_and_uids(dataset, tokenizer):
    rows = [row(f"{'x ' * (i % 7)}{i}", data_source=("a", "b")[i % 2]) for i in range(50)]
    prompts = dataset(rows, chat_template=False)
    assert [tokenizer.decode(prompt.tokens) for prompt in prompts] == [r["prompt"] for r in rows]
    assert prompts.data_sources == ["a", "b"] and len({prompt.uid for prompt in prompts}) == 50
    assert [prompt.uid for prompt in prompts[:3]] == ["a/0", "b/1", "a/2"]


def test_a_prompt_at_the_limit_is_kept_and_a_longer_one_omitted(dataset, tokenizer):
    length = len(tokenizer.encode("1234"))
    rows = [row("1234"), row("12345"), row("12")]
    prompts = dataset(rows, chat_template=False, max_prompt_length=length, overlong_prompts="filter")
    assert [prompt.text for prompt in prompts] == ["1234", "12"] and prompts.filtered == 1
    assert [prompt.uid for prompt in prompts] == ["openai/gsm8k/0", "openai/gsm8k/2"]  # as without the filter
    message = rf"1 of 3 prompts .*max_prompt_length \({length} tokens\); the longest has {length + 1} .*line 2"
    with pytest.raises(ValueError, match=message + r".*overlong_prompts: filter"):
        dataset(rows, chat_template=False, max_prompt_length=length)


def test_a_filter_that_omits_all_prompts_is_an_error(dataset):
    with pytest.raises(ValueError, match="2 of 2 prompts are longer") as caught:
        dataset([row("12345"), row("123")], chat_template=False, max_prompt_length=2, overlong_prompts="filter")
    assert "overlong_prompts" not in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reward_model": {"style": "rule"}}, "line 2: reward_model has no ground_truth"),
        ({"reward_model": {"ground_truth": None}}, "line 2: reward_model.ground_truth is null"),
        ({"reward_model": {"ground_truth": float("nan")}}, "line 2: reward_model.ground_truth is nan"),
        ({"reward_model": "4"}, "line 2: column 'reward_model' is '4', not a dict"),
        ({"data_source": None}, "line 2: column 'data_source' is empty"),
        ({"prompt": []}, r"line 2: column 'prompt' is \[\]"),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "line 2: without a chat template"),
    ],
)
def test_a_wrong_row_is_named(dataset, change, message):
    with pytest.raises(ValueError, match=message):
        dataset([row("2+2?"), row("2+2?") | change], chat_template=False)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"extra_info": {"index": 1, "levels": [{"level": float("nan")}]}}, "extra_info.levels.0.level is nan"),
        ({"extra_info": {"index": 1, "most": float("inf")}}, "extra_info.most is inf"),
    ],
)
def test_a_row_that_cannot_be_posted_to_a_service_is_named(dataset, change, field):
    """pandas writes NaN for a missing number, and the service would never score the row."""
    rows = [row("2+2?", 0, extra_info={"level": 1, "names": [None, "x", True, 0.5]}), row("2+2?") | change]
    with pytest.raises(ValueError, match=f"line 2: {field}, .* as JSON.*null"):
        dataset(rows, posted=True)
    assert len(dataset(rows)) == 2  # other scorers take it
    assert len(dataset(rows[:1], posted=True)) == 1


def test_rows_are_checked_for_the_service_that_scores_them(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("2+2?", extra_info={"level": float("nan")})) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    recipe = Recipe()
    recipe.model.path, recipe.data.train_files = str(tmp_path), [str(tmp_path / "rows.jsonl")]
    recipe.reward.function = "gsm8k"
    assert read_data(recipe, tokenizer, training=True).prompts is not None
    recipe.reward.function = "remote"
    with pytest.raises(ValueError, match=r"extra_info\.level is nan"):
        read_data(recipe, tokenizer, training=True)


def test_a_run_needs_data_files(tokenizer):
    with pytest.raises(ValueError, match=r"data\.train_files"):
        PromptDataset([], tokenizer, DataConfig())


def test_rows_need_only_the_columns_of_their_scorers(tokenizer, tmp_path):
    path = tmp_path / "my_rows.jsonl"
    path.write_text('{"prompt": "2+2?"}\n{"prompt": "3+3?", "reward_model": {"ground_truth": "6"}}\n')

    def read(**reward):
        needed = needed_columns(reward.get("function"), reward.get("functions", {}))
        return PromptDataset([path], tokenizer, DataConfig(), needed=needed)

    prompts = read(function="my_module:my_scorer")
    assert [(prompt.uid, prompt.ground_truth) for prompt in prompts] == [("my_rows/0", None), ("my_rows/1", "6")]
    assert prompts.data_sources == ["my_rows"]
    for free in ({"function": "remote"}, {"function": "judge"}, {"functions": {"judge": 1.0, "unscored": 1.0}}):
        assert len(read(**free)) == 2
    with pytest.raises(ValueError, match="no column 'data_source' and 'reward_model'; it has prompt"):
        read()
    for bound in ({"function": "gsm8k"}, {"functions": {"my_module:my_scorer": 1.0, "gsm8k": 0.5}}):
        with pytest.raises(ValueError, match="no column 'reward_model'; it has prompt"):
            read(**bound)
    path.write_text('{"prompt": "2+2?", "reward_model": {"style": "rule"}}\n')
    assert read(function="my_module:my_scorer")[0].ground_truth is None
    with pytest.raises(ValueError, match="reward_model has no ground_truth"):
        read(function="gsm8k")


def test_rows_that_have_no_tools_in_verl_are_refused_in_a_run_with_tools(tokenizer, tmp_path):
    """verl passes tools to the rows with agent_name tool_agent alone; agent.tools is for every row."""
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    path = tmp_path / "rows.jsonl"

    def read(*names, tools=(tool,)):
        path.write_text("".join(json.dumps(row("2+2?", agent_name=name)) + "\n" for name in names), encoding="utf-8")
        return PromptDataset([path], tokenizer, DataConfig(), tools=tools)

    assert len(read("tool_agent", "tool_agent", None)) == 3
    assert len(read("single_turn_agent", tools=())) == 1
    with pytest.raises(ValueError, match=r"agent_name is 'single_turn_agent', with which verl passes no tools"):
        read("tool_agent", "single_turn_agent")
