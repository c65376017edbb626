"""Bad input through the command line: exit status 2, one block, no traceback, and before any process starts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.stack import run
from tests.test_train_stack import settings


@pytest.fixture
def copy(quickstart_data: Path, tmp_path: Path) -> Path:
    """The quickstart's folder, to be damaged."""
    return Path(shutil.copytree(quickstart_data, tmp_path / "copy"))


def refused(data: Path, tmp_path: Path, *more: str, words: tuple[str, ...]) -> str:
    done = run("train", "recipes/quickstart.yaml", *settings(data, tmp_path / "runs", "bad", *more), timeout=60)
    assert done.returncode == 2, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not (tmp_path / "runs" / "bad" / "metrics.jsonl").exists()
    return done.stderr


def test_recipe_key(quickstart_data: Path, tmp_path: Path) -> None:
    refused(
        quickstart_data,
        tmp_path,
        "rollout.temprature=1",
        words=("rollout.temprature", "did you mean rollout.temperature"),
    )


def test_model_without_config(copy: Path, tmp_path: Path) -> None:
    (copy / "model" / "config.json").unlink()
    refused(copy, tmp_path, words=("model.path", "config.json"))


def test_tokenizer_beyond_the_vocabulary(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "model" / "config.json").read_text())
    (copy / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    refused(copy, tmp_path, words=("vocab_size is 300", "model.tokenizer"))


def test_model_that_the_trainer_would_compute_otherwise(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "model" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    (copy / "model" / "config.json").write_text(json.dumps({**config, "rope_parameters": yarn}))
    refused(copy, tmp_path, words=("config.json", "rotary scaling 'yarn'", "Remove it"))


def test_empty_data_set(copy: Path, tmp_path: Path) -> None:
    (copy / "empty.jsonl").write_text("")
    refused(copy, tmp_path, f"data.train_files=[{copy}/empty.jsonl]", words=("empty.jsonl",))


def test_missing_file(quickstart_data: Path, tmp_path: Path) -> None:
    refused(quickstart_data, tmp_path, "data.train_files=[nowhere.parquet]", words=("nowhere.parquet",))


def test_all_prompts_too_long(quickstart_data: Path, tmp_path: Path) -> None:
    refused(
        quickstart_data,
        tmp_path,
        "data.max_prompt_length=5",
        "data.overlong_prompts=filter",
        words=("max_prompt_length",),
    )


def test_unknown_data_source(copy: Path, tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "data_source": "openai/gsm9k", "reward_model": {"ground_truth": "2"}}
    (copy / "rows.jsonl").write_text(json.dumps(row))
    refused(
        copy,
        tmp_path,
        f"data.train_files=[{copy}/rows.jsonl]",
        "reward.function=null",
        words=("openai/gsm9k", "openai/gsm8k"),
    )


def test_layout_that_does_not_divide(quickstart_data: Path, tmp_path: Path) -> None:
    refused(quickstart_data, tmp_path, "cluster.trainers=3", "megatron.expert_parallel=3", words=("expert", "3"))


def test_full_disk(quickstart_data: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        refused(quickstart_data, tmp_path, f"runs_dir={disk}", words=("MiB free", "runs_dir"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "RECIPE"),
        (["trian", "x.yaml"], "trian"),
        (["train", "nowhere.yaml"], "no file nowhere.yaml"),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere", "--out", "x"], "no run's directory"),
        (["data", "gsm8k", "--source", "nowhere", "--out", "x"], "nowhere"),
    ],
)
def test_command_lines(arguments: list[str], words: str) -> None:
    done = run(*arguments, timeout=60)
    assert done.returncode == 2, done.stderr + done.stdout
    assert words in done.stderr and "Traceback" not in done.stderr
