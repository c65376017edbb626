"""Published data sets with the columns of the hub, converted to verl's columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from megarl.commands.data import aime, dapo_math, deepscaler, geo3k, math, retool_sft
from megarl.commands.data.command import app
from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import SFTDataset, load_tokenizer
from megarl.data.rows import write_parquet
from megarl.recipe.schema import DataConfig
from megarl.rewards import ScoreRequest, resolve, score
from tests.support.fake_hub import running_hub, use_hub
from tests.support.rows import read_rows

VERL = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_in(path: Path, *columns: str) -> list[dict[str, Any]]:
    return [row.values for row in read_rows([path], columns or VERL)]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"First \boxed{1}, and so \boxed{2}.", "2"),  # the last one counts
        (r"$\boxed{\left\{1,2\right\}}$", r"\left\{1,2\right\}"),  # escaped braces close nothing
        (r"It is $\boxed 7$.", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{open", None),
        ("4", None),
    ],
)
def test_the_answer_of_a_solution_is_in_its_last_box(solution: str, answer: str | None) -> None:
    assert math.boxed(solution) == answer


def test_math_keeps_levels_as_numbers(tmp_path: Path) -> None:
    """A curriculum needs numeric levels: text is converted, and "Level ?" does not end the command."""
    problem = {"problem": "1+1?", "level": "Level 3", "type": "Algebra", "solution": r"$\boxed{2}$"}
    for split in ("train", "test"):  # as the hub keeps them
        rows = [problem, {**problem, "level": "Level ?"}]
        write_parquet(tmp_path / "math" / "data" / f"{split}-00000-of-00001.parquet", rows)
    summary, _ = math.prepare(str(tmp_path / "math"), tmp_path / "out")
    assert summary == {tmp_path / "out" / "train.parquet": 2, tmp_path / "out" / "test.parquet": 2}
    first, second = rows_in(tmp_path / "out" / "train.parquet")
    assert first["data_source"] == "DigitalLearningGmbH/MATH-lighteval" and first["ability"] == "math"
    assert first["prompt"] == [{"role": "user", "content": f"1+1? {math.INSTRUCTION}"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (first["extra_info"]["level"], first["extra_info"]["type"]) == (3, "Algebra")
    assert second["extra_info"]["level"] is None and second["extra_info"]["index"] == 1


@pytest.mark.parametrize("form", ["hub", "jsonl"])
def test_geo3k_keeps_the_images_bytes(tmp_path: Path, form: str) -> None:
    """Images arrive in the hub's files, or in files next to JSONL."""
    from PIL import Image

    drawing = Image.new("RGBA", (30, 20), (10, 20, 30, 128))
    file = io.BytesIO()
    drawing.save(file, format="PNG")
    problem: dict[str, Any] = {"problem": "<image>Find x.", "answer": "2 \\sqrt { 2 }"}
    for split in ("train", "test"):
        if form == "hub":
            image = {"bytes": file.getvalue(), "path": None}
            write_parquet(
                tmp_path / "in" / "data" / f"{split}-00000-of-00001.parquet", [{**problem, "images": [image]}]
            )
        else:
            write_jsonl(tmp_path / "in" / f"{split}.jsonl", [{**problem, "images": ["a.png"]}])
            (tmp_path / "in" / "a.png").write_bytes(file.getvalue())
    summary, _ = geo3k.prepare(str(tmp_path / "in"), tmp_path / "out")
    assert summary == {tmp_path / "out" / "train.parquet": 1, tmp_path / "out" / "test.parquet": 1}
    (row,) = rows_in(tmp_path / "out" / "test.parquet", *VERL, "images")
    (image,) = row.pop("images")
    assert image["path"] is None and list(Image.open(io.BytesIO(image["bytes"])).getdata()) == list(drawing.getdata())
    assert image["bytes"] == file.getvalue()
    assert row == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find x. {geo3k.INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2 \\sqrt { 2 }"},
        "extra_info": {"split": "test", "index": 0, "answer": "2 \\sqrt { 2 }", "question": "<image>Find x."},
    }
    assert "<think> </think>" in geo3k.INSTRUCTION and r"\boxed{}" in geo3k.INSTRUCTION


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "Find x.", "answer": "2", "images": ["a.png"]}, "line 1: 1 images, 0 <image>"),
        ({"problem": "<image>", "answer": " ", "images": ["a.png"]}, "the answer ' '"),
        ({"problem": "Find x.", "answer": "2", "images": []}, "line 1: 0 images"),
        ({"problem": "<image>", "answer": "2", "images": ["b.png"]}, "neither bytes nor a file in .*: 'b.png'"),
        ({"problem": "<image>", "answer": "2", "images": [7]}, "neither bytes nor a file in .*: '7'"),
    ],
)
def test_incomplete_geo3k_rows_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "a.png").write_bytes(b"a drawing")
    write_jsonl(tmp_path / "train.jsonl", [row])
    with pytest.raises(ValueError, match=message):
        geo3k.prepare(str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def dapo(prompt: str, truth: str, index: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_dapo_math_omits_duplicates_and_contradictions_with_counts(tmp_path: Path) -> None:
    """Repetitions would make an epoch a hundred epochs; contradictions would reward a wrong answer."""
    rows = [dapo("2+2?", "4", "a"), dapo("3+3?", "6", "b"), dapo("odd?", "1", "c"), dapo("odd?", "3", "d")]
    write_parquet(tmp_path / "hub" / "data" / "dapo-math-17k.parquet", rows * 100)
    result = CliRunner().invoke(app, ["dapo_math", "--source", str(tmp_path / "hub"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    # 400 rows of 3 prompts. One prompt has two answers; the other two have 100 rows each.
    assert "omitted as duplicates: 198 of 400 rows" in result.output
    assert "omitted because their prompts have several answers: 200 of 400 rows (1 prompt)" in result.output
    written = rows_in(tmp_path / "out" / "train.parquet")
    assert [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in written] == [
        ("2+2?", "4"),
        ("3+3?", "6"),
    ]
    assert written[0] == {
        **rows[0],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": "a"},
    }
    assert (
        dapo_math.prepare(str(tmp_path / "hub" / "data" / "dapo-math-17k.parquet"), tmp_path / "b")[0].popitem()[1] == 2
    )


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-1", "Problem": "2+23?", "Solution": "s", "Answer": 25},  # Maxwell-Jia/AIME_2024
        {"id": "0", "problem": "2+23?", "answer": "025", "year": "2024"},  # HuggingFaceH4/aime_2024
        {"question": "2+23?", "answer": "25"},  # opencompass/AIME2025
    ],
)
def test_aime_in_the_columns_of_the_hub(tmp_path: Path, row: dict[str, Any]) -> None:
    summary, notices = aime.prepare(str(write_jsonl(tmp_path / "aime.jsonl", [row, row])), tmp_path, year=2024)
    assert summary == {tmp_path / "test.parquet": 1} and notices == ["omitted as duplicates: 1 of 2 rows"]
    (prepared,) = rows_in(tmp_path / "test.parquet")
    assert prepared["data_source"] == "aime_2024" and prepared["reward_model"]["ground_truth"] == "25"
    assert prepared["prompt"][0]["content"] == f"{aime.BEFORE}2+23?{aime.AFTER}"


def test_deepscaler_has_each_problem_once_with_the_math_scorer(tmp_path: Path) -> None:
    rows = [
        {"problem": "Half of 1?", "answer": "\\frac{1}{2}", "solution": "It is."},
        {"problem": "Half of 1?", "answer": "\\frac{1}{2}", "solution": "So it is."},
        {"problem": "Which?", "answer": "1", "solution": ""},
        {"problem": "Which?", "answer": "2", "solution": ""},
    ]
    summary, notices = deepscaler.prepare(str(write_jsonl(tmp_path / "deepscaler.jsonl", rows)), tmp_path)
    assert summary == {tmp_path / "train.parquet": 1}
    assert notices == [
        "omitted as duplicates: 1 of 4 rows",
        "omitted because their prompts have several answers: 2 of 4 rows (1 prompt)",
    ]
    (prepared,) = rows_in(tmp_path / "train.parquet")
    assert prepared["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    assert prepared["prompt"][0]["content"] == f"Half of 1? {math.INSTRUCTION}"
    scorer = resolve(None, [prepared["data_source"]])[prepared["data_source"]]
    request = ScoreRequest("It is \\boxed{0.5}.", prepared["reward_model"]["ground_truth"], prepared["data_source"])
    assert scorer.name == "math" and score(scorer, request).value == 1


def test_deepscaler_refuses_a_problem_without_an_answer(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "deepscaler.jsonl", [{"problem": "Half of 1?", "answer": " "}])
    with pytest.raises(ValueError, match="the answer is empty"):
        deepscaler.prepare(str(source), tmp_path)


def test_aime_in_verls_columns_is_kept(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "aime-2024.jsonl", [dapo("Solve.", "33", "7")] * 32)
    summary, _ = aime.prepare(str(source), tmp_path)
    assert summary == {tmp_path / "test.parquet": 1}
    (prepared,) = rows_in(tmp_path / "test.parquet")
    assert prepared["data_source"] == "math_dapo" and prepared["prompt"][0]["content"] == "Solve."


def test_aime_refuses_arguments_that_its_source_ignores(tmp_path: Path) -> None:
    verl = write_jsonl(tmp_path / "verl" / "train.jsonl", [dapo("Solve.", "33", "7")])
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: --year 2024: rows in verl's columns keep"):
        aime.prepare(str(verl), tmp_path / "out", year=2024)
    with pytest.raises(ValueError, match="--split train: a file has only one split"):
        aime.prepare(str(verl), tmp_path / "out", split="train")
    for source in (verl, verl.parent):
        with pytest.raises(ValueError, match="--config main: only data sets on the hub"):
            aime.prepare(str(source), tmp_path / "out", config="main")
    assert not (tmp_path / "out").exists()
    assert aime.prepare(str(verl.parent), tmp_path / "out", split="train")[0] == {tmp_path / "out" / "test.parquet": 1}


def test_an_aime_answer_above_999_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"problem": "x", "answer": "1000"}])
    with pytest.raises(ValueError, match=r"line 1: the answer '1000' is not an integer from 0 to 999"):
        aime.prepare(str(source), tmp_path)


RETOOL = (
    "Let me count.\n<code>\n```python\nprint(2+2)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n"
    "So it is four.\n<answer>\n\\boxed{4}\n</answer>"
)
QUESTION = "Solve with code.\n\n*user question:*\n<answer>What is 2+2?</answer>"
# Enough of Qwen's template: tools in front, calls as JSON, results as the user's.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_retool_becomes_turns_and_the_loss_counts_only_the_models_turns(tmp_path: Path) -> None:
    """The loss skips the interpreter's output; otherwise the model would learn to invent it."""
    rows = [
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]}
        for answer in (RETOOL, "It is <answer>5</answer>", "never ends", "<interpreter>4</interpreter>")
    ]
    source = write_jsonl(tmp_path / "source" / "train.jsonl", rows)
    summary, notices = retool_sft.prepare(str(source.parent), tmp_path)
    assert summary == {tmp_path / "train.parquet": 2}
    assert notices[0].startswith("2 rows were omitted; the first: ") and "no <answer>" in notices[0]
    first, second = rows_in(tmp_path / "train.parquet", "messages", "tools")
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert first["messages"][0]["content"] == "What is 2+2?"
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"code": "print(2+2)"}
    assert second["messages"][1]["content"] == "It is\n5"

    make_tiny_tokenizer(tmp_path / "tokenizer")
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TOOL_TEMPLATE}))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    example = SFTDataset([tmp_path / "train.parquet"], tokenizer, DataConfig(), 2000)[0]
    response = tokenizer.decode(example.tokens[example.loss_mask].tolist())
    call = '{"name": "code_interpreter", "arguments": {"code": "print(2+2)"}}'
    assert response == f"Let me count.<tool_call>{call}</tool_call>So it is four.\n\\boxed{{4}}"
    assert "Runs Python code" in tokenizer.decode(example.tokens[: example.prompt_length].tolist())
    assert "print(2+2)" in example.text
    with pytest.raises(ValueError, match=r"row 0: tools and tool calls .* data.chat_template: true"):
        SFTDataset([tmp_path / "train.parquet"], tokenizer, DataConfig(chat_template=False), 2000)
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"chat_template": TOOL_TEMPLATE.split("endif %}", 1)[1]})
    )
    with pytest.raises(ValueError, match="never reads the tools"):
        SFTDataset([tmp_path / "train.parquet"], load_tokenizer(tmp_path / "tokenizer"), DataConfig(), 2000)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"problem": "2+2?", "answer": "4", "id": 1, "picture": "x"}
    monkeypatch.chdir(tmp_path)
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.dataset("math-ai/aime25").commit(
            {f"{split}.jsonl": json.dumps({**row, "id": split}).encode() for split in ("test", "train", "two/test")}
        )
        aime.prepare("math-ai/aime25", tmp_path, 2025, "test")
        assert rows_in(tmp_path / "test.parquet")[0]["data_source"] == "aime_2025"
        aime.prepare("math-ai/aime25", tmp_path, 2025, "test", "two")
        assert server.downloads() == ["test.jsonl"] * 2
        with pytest.raises(ValueError, match="no column 'messages'; it has problem, answer, id, picture"):
            retool_sft.prepare("math-ai/aime25", tmp_path)
        with pytest.raises(ValueError, match="has no data set math-ai/none"):
            aime.prepare("math-ai/none", tmp_path, 2025, "test")


def test_a_part_of_a_split_is_refused(tmp_path: Path) -> None:
    """Half of the data would be missing without a word."""
    shards = [tmp_path / "hub" / "data" / f"train-0000{number}-of-00002.parquet" for number in range(2)]
    for number, shard in enumerate(shards):
        write_parquet(shard, [{"problem": f"{number}+1?", "answer": str(number + 1)}])
    assert deepscaler.prepare(str(tmp_path / "hub"), tmp_path)[0] == {tmp_path / "train.parquet": 2}
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"hub has only a part of train: data/train-00000-of-00002\.parquet"):
        deepscaler.prepare(str(tmp_path / "hub"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_in_several_forms_is_refused(tmp_path: Path) -> None:
    """Only one form would be read, and which one would depend on the program."""
    row = {"problem": "1+1?", "answer": "2"}
    write_jsonl(tmp_path / "train.jsonl", [row])
    write_parquet(tmp_path / "train.parquet", [row])
    with pytest.raises(ValueError, match=r"has train in several forms: train\.jsonl, train\.parquet\. Keep one"):
        deepscaler.prepare(str(tmp_path), tmp_path / "out")


def test_a_split_in_several_folders_is_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_jsonl(tmp_path / folder / "train.jsonl", [{"problem": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"has train in several configurations: one, two\. Name one of these folders"):
        deepscaler.prepare(str(tmp_path), tmp_path / "out")
    assert deepscaler.prepare(str(tmp_path / "two"), tmp_path)[0] == {tmp_path / "train.parquet": 1}


@pytest.mark.parametrize("form", ["file", "shards", "hub"])
def test_a_source_without_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """A shard may be empty if another has rows."""
    row = {"problem": "1+1?", "answer": "2"}
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.dataset("org/empty").commit({"train.jsonl": b""})
        sources = {"file": tmp_path / "rows.jsonl", "shards": tmp_path / "shards", "hub": "org/empty"}
        write_jsonl(tmp_path / "rows.jsonl", [])
        for number in range(2):
            write_parquet(tmp_path / "shards" / f"train-0000{number}-of-00002.parquet", [row])
        empty = pyarrow.schema([("problem", pyarrow.string()), ("answer", pyarrow.string())]).empty_table()
        for number in range(2):
            if form == "shards" and number:
                assert deepscaler.prepare(str(sources[form]), tmp_path)[0] == {tmp_path / "train.parquet": 1}
            pyarrow.parquet.write_table(empty, tmp_path / "shards" / f"train-0000{number}-of-00002.parquet")
        with pytest.raises(ValueError, match="has no rows"):
            deepscaler.prepare(str(sources[form]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_contradictions_are_refused(tmp_path: Path) -> None:
    rows = [{"problem": "1+1?", "answer": answer} for answer in "23"]
    with pytest.raises(ValueError, match="every prompt has several answers"):
        deepscaler.prepare(str(write_jsonl(tmp_path / "rows.jsonl", rows)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_split_in_a_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"hf://openai/gsm8k/main/train.*hf://OWNER/NAME.*the command chooses the split"
    ):
        deepscaler.prepare("hf://openai/gsm8k/main/train", tmp_path / "out")


def test_a_cached_commit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may have newer rows."""
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        row = {"problem": "1+1?", "answer": "2"}
        server.dataset("org/rows").commit({"train.jsonl": json.dumps(row).encode()})
        assert deepscaler.prepare("org/rows", tmp_path / "a").notices == []
        use_hub(monkeypatch, server.url, tmp_path / "home", offline=True)
        _, notices = deepscaler.prepare("org/rows", tmp_path / "b")
        assert len(notices) == 1 and "org/rows is taken from the cache, at commit" in notices[0]


@pytest.mark.parametrize("command", ["math", "dapo_math", "deepscaler", "aime", "geo3k", "retool_sft"])
def test_unreadable_sources_are_refused(tmp_path: Path, command: str) -> None:
    def message(source: Path) -> str:
        failed = CliRunner().invoke(app, [command, "--source", str(source), "--out", str(tmp_path / "out")])
        assert isinstance(failed.exception, ValueError)
        return str(failed.exception)

    assert "neither a file, nor a folder, nor a hub name" in message(tmp_path / "no" / "such")
    (tmp_path / "empty").mkdir()
    absent = "have no train.jsonl, train.parquet or train-00000-of-*.parquet (they have: nothing)"
    assert absent in message(tmp_path / "empty")
    if command not in ("math", "geo3k"):  # which have two splits and accept no single file
        assert "no column" in message(write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}]))
        (tmp_path / "rows.csv").write_text("question,answer\n1,2\n")
        assert "docs/data.md" in message(tmp_path / "rows.csv")
    assert not (tmp_path / "out").exists()
