"""docs/hub.md: its first recipe, and its output of `megarl model check`; commands of `hf` on all pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from megarl import load_recipe
from megarl.cli import app
from megarl.preflight.hub_inputs import fetch_inputs, training_inputs
from megarl.preflight.survey import prepare_training
from megarl.recipe import to_yaml
from megarl.recipe.paths import with_absolute_paths
from tests.support.fake_hub import folder_files, running_hub, use_hub
from tests.support.gsm8k import SAMPLE, rewards_of_solutions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hub.md").read_text()


def test_the_first_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart_data: Path) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, resolved = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (printed, *_) = re.findall(r"```\n(model\.path: .*?)```", PAGE, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(f"base: {ROOT}/recipes/quickstart.yaml\n{recipe}")
    rows = (SAMPLE / "train.jsonl").read_bytes()
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.model("Qwen/Qwen3-1.7B").commit(folder_files(quickstart_data / "model"))
        server.dataset("openai/gsm8k").commit({"main/train.jsonl": rows, "main/test.jsonl": rows})
        absolute = with_absolute_paths(load_recipe("recipe.yaml", ["data.max_prompt_length=400"]))
        inputs = fetch_inputs(absolute, training_inputs(absolute))
    local, notices = inputs.recipe, inputs.notices
    prepared = prepare_training(local)
    assert prepared.data_sources == ["openai/gsm8k"] and prepared.rows_of_sets == {"train": len(rows.splitlines())}
    assert prepared.prompts is not None
    assert rewards_of_solutions(local, prepared.prompts) == [1.0] * len(rows.splitlines())
    shown = [re.sub(r"[0-9a-f]{12}$", "COMMIT", line) for line in notices if not line.startswith("data.eval_files")]
    assert shown == [re.sub(r"[0-9a-f]{12}$", "COMMIT", line) for line in printed.splitlines()]
    pattern = r"hf://Qwen/Qwen3-1\.7B@[0-9a-f]{40}"
    for text in (yaml.safe_load(resolved)["model"]["path"], yaml.safe_load(to_yaml(local))["model"]["path"]):
        assert re.fullmatch(pattern, text)


def test_the_model_check(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```\n(Qwen/Qwen3-8B\n.*?)```", PAGE, re.DOTALL)
    config = json.loads((ROOT / "megarl/hf/published/Qwen3-8B/config.json").read_text())
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.model("Qwen/Qwen3-8B").commit({"config.json": json.dumps(config).encode(), "model.safetensors": b""})
        assert app(args=["model", "check", "Qwen/Qwen3-8B"], standalone_mode=False) == 0
    assert capsys.readouterr().out == shown


def downloads() -> list[list[str]]:
    """Return the arguments of each `hf download` in the code blocks of all pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [
        line for page in pages for line in page.read_text().splitlines() if re.match(r"(\S.* )?hf download \S+/", line)
    ]
    return [shlex.split(line.partition("hf download")[2], comments=True) for line in lines]


def test_downloads_name_one_repository() -> None:
    """hf takes one pattern per option; a further one is the name of a file, with which it ignores the patterns."""
    from huggingface_hub.cli.hf import app as hf

    contexts = []
    for words in downloads():
        name, command, arguments = hf.resolve_command(click.Context(hf), ["download", *words])
        assert command is not None
        contexts.append(command.make_context(name, arguments))
    assert len(contexts) > 10 and not any(context.params["filenames"] for context in contexts)
    assert ("*.bin", "*.pt") in [tuple(context.params["exclude"] or ()) for context in contexts]
