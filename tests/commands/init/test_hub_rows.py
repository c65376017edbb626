"""`megarl init` for rows on the hub: their columns are in the recipe if megarl knows them, and in a remark otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.init.command import InitOptions, init
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

GSM8K = "hf://openai/gsm8k/main/train"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def written(task: str, data: str, reward: str | None = None) -> Recipe:
    init(Path("a.yaml"), InitOptions(task, "Qwen/Qwen3-4B", data, "2 cpu", reward), ask=False)
    return load_recipe("a.yaml")


@pytest.mark.parametrize(("task", "answer"), [("grpo", "ground_truth"), ("dapo", "ground_truth"), ("sft", "response")])
def test_known_columns_are_written(task: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(task, GSM8K)
    assert recipe.data.columns == {"prompt": "question", answer: "answer"}
    assert recipe.reward.function == (None if task == "sft" else "gsm8k"), "its rows have no data_source"
    assert "data.columns has the column names of openai/gsm8k: question, answer" in capsys.readouterr().out


def test_rows_without_a_data_source(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_other_columns_have_a_remark(task: str, data: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(task, data).data.columns == {}
    output = capsys.readouterr().out
    assert "are not checked here" in output and example in output


def test_files_have_no_remark(capsys: pytest.CaptureFixture[str]) -> None:
    written("grpo", "a.parquet", "math")
    assert "data.columns" not in capsys.readouterr().out


def test_a_data_set_without_a_split_is_refused_at_the_answer() -> None:
    with pytest.raises(
        InputError, match=r"--data: hf://openai/gsm8k does not name rows .*hf://openai/gsm8k/main/train"
    ):
        written("grpo", "hf://openai/gsm8k")
