"""Bad input through the command line: exit status 2, one block, no traceback, and before any process starts.

The command line runs in this process, in which starting a cluster fails; `test_an_unknown_key_ends_the_process_with_a_recipe_error` runs it as a user does.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import assembly, cli
from megarl.commands import evaluate, export
from megarl.exit_status import guarded
from tests.support.stack import ROOT, run
from tests.support.training_runs import settings


@pytest.fixture
def copy(quickstart_data: Path, tmp_path: Path) -> Path:
    """The quickstart's folder, to be damaged."""
    return Path(shutil.copytree(quickstart_data, tmp_path / "copy"))


class CommandLine:
    """`megarl ARGUMENTS` in this process."""

    def __init__(self, data: Path, runs: Path, output: pytest.CaptureFixture[str]):
        self.data, self.runs, self.output = data, runs, output

    def refuses(self, *arguments: str, words: tuple[str, ...]) -> None:
        """Assert that the command ends with status 2 and one block on stderr with these words."""
        status = guarded(lambda: cli.app(args=list(arguments), prog_name="megarl", standalone_mode=False), debug=False)
        printed = self.output.readouterr()
        assert status == 2, printed.err + printed.out
        assert "Traceback" not in printed.err
        for word in words:
            assert word in printed.err, printed.err

    def refuses_training(self, *overrides: str, words: tuple[str, ...], data: Path | None = None) -> None:
        """Assert that the quickstart with these settings is rejected and leaves no run."""
        arguments = settings(data or self.data, self.runs, "bad", *overrides)
        self.refuses("train", str(ROOT / "recipes/quickstart.yaml"), *arguments, words=words)
        assert not (self.runs / "bad" / "metrics.jsonl").exists()


@pytest.fixture
def megarl(
    quickstart_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("a cluster was started")

    for module in (assembly, evaluate, export):
        monkeypatch.setattr(module, "connected", started)
    handler = signal.getsignal(signal.SIGTERM)  # the command line puts its own in place
    yield CommandLine(quickstart_data, tmp_path / "runs", capsys)
    signal.signal(signal.SIGTERM, handler)


def test_an_unknown_key_ends_the_process_with_a_recipe_error(quickstart_data: Path, tmp_path: Path) -> None:
    arguments = settings(quickstart_data, tmp_path / "runs", "bad", "rollout.temprature=1")
    done = run("train", "recipes/quickstart.yaml", *arguments, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("recipe error:") and "rollout.temprature" in done.stderr
    assert "did you mean rollout.temperature" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_model_without_config(copy: Path, megarl: CommandLine) -> None:
    (copy / "model" / "config.json").unlink()
    megarl.refuses_training(data=copy, words=("model.path", "config.json"))


def test_tokenizer_beyond_the_vocabulary(copy: Path, megarl: CommandLine) -> None:
    config = json.loads((copy / "model" / "config.json").read_text())
    (copy / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    megarl.refuses_training(data=copy, words=("vocab_size is 300", "model.tokenizer"))


def test_model_with_unsupported_rotary_scaling(copy: Path, megarl: CommandLine) -> None:
    config = json.loads((copy / "model" / "config.json").read_text())
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    (copy / "model" / "config.json").write_text(json.dumps({**config, "rope_parameters": dynamic}))
    megarl.refuses_training(data=copy, words=("config.json", "rotary scaling 'dynamic'", "Use a model without it"))


def test_empty_data_set(copy: Path, megarl: CommandLine) -> None:
    (copy / "empty.jsonl").write_text("")
    megarl.refuses_training(f"data.train_files=[{copy}/empty.jsonl]", data=copy, words=("empty.jsonl",))


def test_missing_file(megarl: CommandLine) -> None:
    megarl.refuses_training("data.train_files=[nowhere.parquet]", words=("nowhere.parquet",))


def test_all_prompts_too_long(megarl: CommandLine) -> None:
    megarl.refuses_training(
        "data.max_prompt_length=5",
        "data.overlong_prompts=filter",
        words=("max_prompt_length",),
    )


def test_unknown_data_source(copy: Path, megarl: CommandLine) -> None:
    row = {"prompt": "1+1?", "data_source": "openai/gsm9k", "reward_model": {"ground_truth": "2"}}
    (copy / "rows.jsonl").write_text(json.dumps(row))
    megarl.refuses_training(
        f"data.train_files=[{copy}/rows.jsonl]",
        "reward.function=null",
        data=copy,
        words=("openai/gsm9k", "openai/gsm8k"),
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}, "no column"),
        ({"prompt": "1+1?", "response": "2 " * 99}, "longer than data.max_prompt_length"),
        ({"messages": [{"role": "user", "content": "1+1?"}]}, "needs a prompt and then an answer"),
    ],
)
def test_held_out_rows_are_checked_like_training_rows(
    copy: Path, megarl: CommandLine, row: dict[str, object], words: str
) -> None:
    (copy / "held_out.jsonl").write_text(json.dumps(row))
    arguments = [f"model.path={copy}/model", f"data.train_files=[{copy}/data/sft_test.parquet]"]
    arguments += [f"data.eval_files=[{copy}/held_out.jsonl]", f"runs_dir={megarl.runs}"]
    megarl.refuses("train", str(ROOT / "recipes/tiny/sft.yaml"), *arguments, words=("held_out.jsonl, line 1", words))


def test_eval_of_a_recipe_without_sampling(megarl: CommandLine) -> None:
    megarl.refuses("eval", str(ROOT / "recipes/tiny/sft.yaml"), words=("train.source", "evaluation.at_start"))


def test_layout_that_does_not_divide(megarl: CommandLine) -> None:
    megarl.refuses_training("cluster.trainers=3", "megatron.expert_parallel=3", words=("expert", "3"))


def test_full_disk(megarl: CommandLine, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        megarl.refuses_training(f"runs_dir={disk}", words=("MiB free", "runs_dir"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "RECIPE"),
        (["trian", "x.yaml"], "trian"),
        (["train", "nowhere.yaml"], "the file nowhere.yaml does not exist"),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere", "--out", "x"], "not a run's directory"),
        (["data", "gsm8k", "--source", "nowhere", "--out", "x"], "nowhere"),
    ],
)
def test_command_lines(megarl: CommandLine, arguments: list[str], words: str) -> None:
    megarl.refuses(*arguments, words=(words,))


def test_samples_longer_than_the_models_context(megarl: CommandLine) -> None:
    megarl.refuses_training(
        "data.max_prompt_length=256",
        "rollout.max_response_length=512",
        words=("rollout.max_response_length = 512", "data.max_prompt_length = 256", "768 tokens", "lower the two"),
    )


def test_unavailable_tools(megarl: CommandLine) -> None:
    megarl.refuses_training(
        "data.chat_template=true", "agent.tools=[code_interpretr]", words=("did you mean 'code_interpreter'",)
    )
    dies = "agent.mcp.s.command=[python, -c, 'import sys; sys.exit(3)']"
    megarl.refuses_training("data.chat_template=true", dies, words=("MCP server 's' cannot be reached",))
    undecorated = "agent.tools=['tests.support.agent_tools:not_a_tool']"
    megarl.refuses_training("data.chat_template=true", undecorated, words=("is not decorated with megarl.agents.tool",))
