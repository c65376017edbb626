"""Columns of the rows in `megarl init`: in the recipe if megarl knows them or reads them, and in a remark otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.commands.init.command import InitOptions, init
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

Capture = pytest.CaptureFixture[str]
GSM8K = "hf://openai/gsm8k/main/train"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(rows: list[dict[str, Any]], file: str) -> None:
    if file.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        Path(file).write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))


def written(task: str, data: str, reward: str | None = None) -> Recipe:
    init(Path("a.yaml"), InitOptions(task, "Qwen/Qwen3-4B", data, "2 cpu", reward), ask=False)
    return load_recipe("a.yaml")


@pytest.mark.parametrize(("task", "answer"), [("grpo", "ground_truth"), ("dapo", "ground_truth"), ("sft", "response")])
def test_known_columns_are_written(task: str, answer: str, capsys: Capture) -> None:
    recipe = written(task, GSM8K)
    assert recipe.data.columns == {"prompt": "question", answer: "answer"}
    assert recipe.reward.function == (None if task == "sft" else "gsm8k"), "its rows have no data_source"
    assert (
        f"data.columns has the column names of openai/gsm8k: prompt: question, {answer}: answer"
        in capsys.readouterr().out
    )


def test_rows_without_a_data_source(capsys: Capture) -> None:
    assert written("grpo", GSM8K, "rows").reward.function is None
    output = capsys.readouterr().out
    assert "these rows have no data_source" in output and "add reward: {function: gsm8k}" in output


@pytest.mark.parametrize(
    ("task", "data", "example"),
    [
        ("grpo", "hf://my/rows/train", "columns: {prompt: question, ground_truth: answer}"),
        ("grpo", f"{GSM8K},a.parquet", "columns: {prompt: question, ground_truth: answer}"),
        ("sft", "hf://my/rows/train", "columns: {prompt: question, response: answer}"),
        ("dpo", GSM8K, "columns: {prompt: question, chosen: better, rejected: worse}"),
    ],
)
def test_other_columns_have_a_remark(task: str, data: str, example: str, capsys: Capture) -> None:
    assert written(task, data).data.columns == {}
    output = capsys.readouterr().out
    assert "are not checked here" in output and example in output


def test_files_that_do_not_exist_have_no_remark(capsys: Capture) -> None:
    written("grpo", "a.parquet", "math")
    assert "data.columns" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "reward", "row", "columns"),
    [
        ("grpo", "gsm8k", {"question": "1+1", "answer": "2"}, {"prompt": "question", "ground_truth": "answer"}),
        ("grpo", "gsm8k", {"prompt": "1+1", "ground_truth": "2"}, {"ground_truth": "ground_truth"}),
        ("grpo", "a.py:f", {"problem": "1+1"}, {"prompt": "problem"}),
        (
            "grpo",
            "rows",
            {"prompt": "1+1", "data_source": "gsm8k", "reward_model": {"style": "rule"}, "answer": "2"},
            {},
        ),
        ("sft", None, {"question": "1+1", "answer": "2"}, {"prompt": "question", "response": "answer"}),
        ("sft", None, {"messages": [], "answer": "2"}, {}),
        ("dpo", None, {"question": "1+1", "chosen": "2", "rejected": "3"}, {"prompt": "question"}),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_usual_columns_of_files(
    task: str, reward: str | None, row: dict[str, Any], columns: dict[str, str], suffix: str, capsys: Capture
) -> None:
    write([row | {"extra": 1}], f"a.{suffix}")
    assert written(task, f"a.{suffix}", reward).data.columns == columns
    output = capsys.readouterr().out
    assert "no column" not in output
    shown = ", ".join(f"{key}: {name}" for key, name in columns.items())
    assert (f"data.columns is guessed from the columns of a.{suffix}: {shown}" in output) == bool(columns)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_that_a_file_lacks(suffix: str, capsys: Capture) -> None:
    write([{"question": "1+1", "label": "2"}], f"a.{suffix}")
    assert written("grpo", f"a.{suffix}", "gsm8k").data.columns == {"prompt": "question"}
    output = capsys.readouterr().out
    assert f"a.{suffix}: no column 'reward_model'; it has question, label" in output
    assert "columns: {ground_truth: NAME}" in output


def test_only_columns_of_every_file_are_named(capsys: Capture) -> None:
    write([{"question": "1+1", "answer": "2"}], "a.jsonl")
    write([{"question": "1+1", "label": "2"}], "b.jsonl")
    assert written("grpo", "a.jsonl,b.jsonl", "gsm8k").data.columns == {"prompt": "question"}
    assert "b.jsonl: no column 'reward_model'" in capsys.readouterr().out


def test_a_column_that_a_file_has_under_its_default_name_is_not_guessed(capsys: Capture) -> None:
    write([{"question": "1+1", "prompt": "1+1", "answer": "2"}], "a.jsonl")
    write([{"question": "1+1", "answer": "2"}], "b.jsonl")
    assert written("grpo", "a.jsonl,b.jsonl", "gsm8k").data.columns == {"ground_truth": "answer"}
    assert "b.jsonl: no column 'prompt'" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_refused() -> None:
    Path("a.parquet").write_text("question,answer")
    Path("b.jsonl").mkdir()
    problems = {
        "a.parquet": r"--data: a\.parquet is not a readable parquet",
        "b.jsonl": r"--data: b\.jsonl: this is a folder; list its files",
    }
    for file, problem in problems.items():
        with pytest.raises(InputError, match=problem):
            written("grpo", file, "gsm8k")
    assert not Path("a.yaml").exists()


def test_a_data_set_without_a_split_is_refused_at_the_answer() -> None:
    with pytest.raises(
        InputError, match=r"--data: hf://openai/gsm8k does not name rows .*hf://openai/gsm8k/main/train"
    ):
        written("grpo", "hf://openai/gsm8k")
