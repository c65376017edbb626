"""Answers of `megarl init`: devices, files, models and rewards, and errors of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.commands.init import answers
from megarl.commands.init.answers import (
    Machines,
    check_files,
    check_model,
    check_reward,
    check_task,
    devices_here,
    read_machines,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8 H100", Machines(1, 8, "cuda", "H100")),
        ("8 h100", Machines(1, 8, "cuda", "H100")),
        ("4 H100", Machines(1, 4, "cuda", "H100")),
        ("16 H100", Machines(2, 8, "cuda", "H100")),
        (" 2 x 4  H200 ", Machines(2, 4, "cuda", "H200")),
        ("2x8 910B", Machines(2, 8, "npu", "910B")),
        ("16 Atlas 800T A3", Machines(1, 16, "npu", "Atlas 800T A3")),
        ("8 910B3", Machines(1, 8, "npu", "910B3")),
        ("8 cuda", Machines(1, 8, "cuda")),
        ("2 CPU", Machines(1, 2, "cpu")),
    ],
)
def test_devices(text: str, expected: Machines) -> None:
    assert read_machines(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("H100", "not a number and kind"),
        ("8", "not a number and kind"),
        ("0 H100", "at least one device"),
        ("8 x H100", "write '8 H100' for 8 devices, or '8 x 8 H100' for 8 machines of 8"),
        ("16xAtlas 800T A3", "or '16 x 16 Atlas 800T A3' for 16 machines of 16"),
        ("2 x 910b", "write '2 910b' for 2 devices, or '2 x 8 910b'"),
        ("8 * cuda", "write '8 cuda'"),
        ("0 x H100", "is unknown|at least one device"),
        ("2x", "not a number and kind"),
        ("8 H10", "did you mean 'H100'"),
        ("12 H100", "a machine has 8 devices of this kind; write e.g. '2 x 8 H100'"),
    ],
)
def test_wrong_devices(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_machines(text)


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: ["a", "b", "c"] if "nvidia" in pattern else [])
    assert devices_here() == "3 cuda"
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    assert devices_here() == "2 cpu" and read_machines(devices_here()).kind == "cpu"


def test_known_machines_are_all_accepted() -> None:
    for name in answers.known_machines():
        assert read_machines(f"1 {name}").device is not None


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"the folder model has no config\.json"):
        check_model("model")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert check_model("model") == "model" and check_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(ValueError, match="neither a folder here nor a name on the hub"):
        check_model("/no/such/folder")
    with pytest.raises(ValueError, match=r"Qwen3-8B is neither .* owner/name, such as Qwen/Qwen3-8B\."):
        check_model("Qwen3-8B")


def test_files() -> None:
    assert check_files("a.parquet, hf://org/name/train,b.jsonl") == ("a.parquet", "hf://org/name/train", "b.jsonl")
    problems = {
        "data/*.parquet": r"data/\*\.parquet: patterns are not expanded; list the files",
        "~/a.jsonl": "~ is not expanded; write /",
        "a.csv": "neither in .parquet nor in .jsonl",
        " , ": "at least one file",
        "s3://bucket/a.parquet": "s3://bucket/a.parquet is neither a file on this machine",
    }
    for text, problem in problems.items():
        with pytest.raises(ValueError, match=problem):
            check_files(text)


def test_rewards_and_tasks() -> None:
    assert [check_reward(text) for text in ("rows", "gsm8k", "my.rewards:close", "a/b.py:f")]
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        check_reward("gsm8")
    for text in ("remote", "reward_model", "unscored"):  # the first two need further settings, the third scores nothing
        with pytest.raises(ValueError, match=f"the scorer '{text}' is unknown") as error:
            check_reward(text)
        assert not {"remote", "reward_model", "unscored"} & set(
            re.findall(r"\w+", str(error.value).partition("Known: ")[2])
        )
    assert check_task("GRPO") == "grpo"
    with pytest.raises(ValueError, match="grpo, dapo, sft, dpo"):
        check_task("rlhf")
