"""`megarl reproduce` over written runs: what differs, the command that repeats the run, and refusals. No training runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.identity import CONTENTS, data_digest, weights_digest
from megarl.commands import reproduce as command
from megarl.commands.reproduce import reproduce
from megarl.errors import InputError, RecipeError
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.provenance import provenance_of
from megarl.recipe.load import read_recipe
from megarl.recipe.text import to_yaml


class Recorded:
    """A finished run with a model, one file of rows, metrics and provenance."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunDirectory(folder / "runs" / "first")
        self.rows, self.model = folder / "train.jsonl", folder / "model"
        self.rows.write_text('{"prompt": "1 + 1"}\n')
        self.model.mkdir()
        (self.model / "model.safetensors").write_bytes(b"weights")
        (folder / "empty.yaml").write_text("{}")
        settings = [f"model.path={self.model}", f"data.train_files={self.rows}", "name=first", "train.resume=auto"]
        self.recipe = read_recipe(folder / "empty.yaml", [*settings, f"runs_dir={folder / 'runs'}"]).recipe
        self.run.path.mkdir(parents=True)
        self.run.write_recipe(to_yaml(self.recipe))
        write_metrics(self.run, [0.5, 0.75])
        identity = {CONTENTS: data_digest(self.recipe.data), "model": {"weights": weights_digest(self.model)}}
        self.provenance = provenance_of(self.recipe, identity)
        self.write_summary(self.provenance)

    def write_summary(self, *starts: dict[str, Any]) -> None:
        sessions = [{"first_step": 1, "provenance": provenance} for provenance in starts]
        summary = {"status": "finished", "steps": 2, "total_steps": 2, "sessions": sessions}
        self.run.summary.write_text(json.dumps(summary))


def write_metrics(run: RunDirectory, rewards: Sequence[float]) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "critic/rewards/mean": reward, "timing_s/step": step} for step, reward in enumerate(rewards, 1)
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Recorded(folder)


def printed(capsys: pytest.CaptureFixture[str], run: Path, *overrides: str, name: str | None = None) -> tuple[str, str]:
    assert reproduce(run, name, overrides, only_print=True) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_print_names_the_command(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    out, differences = printed(capsys, recorded.run.path, "train.steps=5")
    assert shlex.split(out) == [
        "python", "-m", "megarl", "train", str(recorded.run.recipe), "train.steps=5", "name=first-reproduced",
        f"runs_dir={recorded.folder / 'runs'}", "train.resume=never",
    ]  # fmt: skip
    assert "finished, 2 of 2 steps" in differences
    assert (
        "as in the run: megarl and the versions of its stack; recipe; training data; weights of the model"
        in differences
    )
    assert "not as in the run" not in differences and "not compared" not in differences


def test_print_names_the_command_of_an_installed_wheel(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv tool and pipx install no module for the user's python."""
    monkeypatch.setattr(sys, "argv", ["/some/bin/megarl"])
    out, _ = printed(capsys, recorded.run.path)
    assert shlex.split(out)[:3] == ["megarl", "train", str(recorded.run.recipe)]


def test_differences_are_listed(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {**recorded.provenance["versions"], "torch": "1.0"}
    hosts = {"hosts": {"node-7": {"trainers": 2}}, "devices": {"kind": "cpu", "trainers": {"cpu": 2}}}
    older = {**recorded.provenance, "versions": {**versions, "ray": "0.1"}}
    recorded.write_summary(older, {**recorded.provenance, "versions": versions, **hosts})
    recorded.rows.write_text("other rows")
    (recorded.model / "model.safetensors").write_bytes(b"other weights")
    text = recorded.run.recipe.read_text()
    recorded.run.recipe.write_text(text.replace("temperature: 1.0", "temperature: 0.9"))
    _, differences = printed(capsys, recorded.run.path)
    here = recorded.provenance["versions"]
    for line in (
        f"torch: 1.0 in the run, {here['torch']} here",
        "recipe: recipe.resolved.yaml was changed since",
        "training data: other contents than in the run",
        "weights of the model: other weights than in the run",
        "start 1 ran with other versions: ray 0.1",
        "ran on        node-7: 2 trainers; trainers' devices: 2 x cpu (cpu)",
    ):
        assert line in differences


def test_inputs_that_are_not_here(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.rows.unlink()
    _, differences = printed(capsys, recorded.run.path, f"model.path={recorded.folder / 'gone'}")
    assert f"training data: {recorded.rows} cannot be read here" in differences
    assert f"weights of the model: {recorded.folder / 'gone'} cannot be read here" in differences


def test_a_run_without_provenance(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.run.summary.unlink()
    out, differences = printed(capsys, recorded.run.path)
    assert "the run has not recorded its provenance" in differences and out.startswith("python -m megarl train ")


def test_settings_that_the_run_did_not_have(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of an earlier megarl: newer settings have their defaults."""
    text = recorded.run.recipe.read_text()
    assert "  top_k: -1\n" in text
    recorded.run.recipe.write_text(text.replace("  top_k: -1\n", ""))
    _, differences = printed(capsys, recorded.run.path)
    assert "settings that the run's megarl did not have: rollout.top_k have their defaults" in differences


def test_modules_come_from_the_folder_of_the_start(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    before = recorded.provenance["folder"]
    _, differences = printed(capsys, recorded.run.path, "reward.function=my_rewards:close")
    assert f"my_rewards: the run imported from {before}, and this is {tmp_path / 'mine'}" in differences


@pytest.mark.parametrize(("resume", "expected"), [("auto", "never"), ("inner", "never"), ("outer", "kept")])
def test_a_start_from_another_runs_checkpoint_is_kept(
    resume: str, expected: str, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        "inner": recorded.run.checkpoints / "step_000001",
        "outer": recorded.folder / "runs/base/checkpoints/step_000003",
    }
    value = str(paths.get(resume, resume))
    recorded.run.recipe.write_text(recorded.run.recipe.read_text().replace("resume: auto", f"resume: {value}"))
    out, _ = printed(capsys, recorded.run.path)
    assert f"train.resume={value if expected == 'kept' else 'never'}" in shlex.split(out)


@pytest.mark.parametrize(
    ("name", "parent", "expected"),
    [("second", "runs", "second"), ("other/second", "here/other", "second"), ("./second/", "here", "second")],
)
def test_a_name_with_a_slash_is_a_path_from_the_working_directory(
    name: str,
    parent: str,
    expected: str,
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (recorded.folder / "here").mkdir()
    monkeypatch.chdir(recorded.folder / "here")
    out, _ = printed(capsys, recorded.run.path, name=name)
    assert [f"name={expected}", f"runs_dir={recorded.folder / parent}"] == shlex.split(out)[-3:-1]


def test_a_missing_recipe_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    recorded.run.recipe.unlink()
    with pytest.raises(InputError, match=r"recipe\.resolved\.yaml is missing"):
        reproduce(recorded.run.path, None, [], only_print=True)
    with pytest.raises(InputError, match="does not exist"):
        reproduce(tmp_path / "nothing", None, [], only_print=True)


def test_refusals(recorded: Recorded) -> None:
    write_metrics(RunDirectory(recorded.folder / "runs" / "second"), [0.5])
    with pytest.raises(InputError, match="second already holds a run"):
        reproduce(recorded.run.path, "second", [], only_print=True)
    with pytest.raises(InputError, match="first already holds a run"):
        reproduce(recorded.run.path, "first", [], only_print=True)
    with pytest.raises(
        InputError, match=r"megarl reproduce sets name, runs_dir, train\.resume itself, got name=x: use --name, "
    ):
        reproduce(recorded.run.path, None, ["name=x"], only_print=True)
    recorded.run.summary.write_text("{")
    with pytest.raises(InputError, match=r"summary\.json is damaged"):
        reproduce(recorded.run.path, None, [], only_print=True)
    recorded.run.recipe.write_text("unknown_key: 1\n")
    with pytest.raises(RecipeError, match="unknown key"):
        reproduce(recorded.run.path, None, [], only_print=True)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, 0.75], "the metrics of 2 steps are bitwise equal to the run's"),
        ([0.5, 0.5], "1 metrics differ, the first: step 2: critic/rewards/mean is 0.5, in the recorded run 0.75"),
        ([], "the runs have no step in common"),
    ],
)
def test_the_run_is_repeated_and_compared(
    rewards: list[float],
    expected: str,
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = []

    def run_child(words: list[str], environ: Any, stop_seconds: float) -> int:
        assert environ is os.environ and stop_seconds > recorded.recipe.train.grace_seconds
        commands.append(words)
        write_metrics(RunDirectory(recorded.folder / "runs" / "again"), rewards)
        return 0

    monkeypatch.setattr(command, "run_child", run_child)
    assert reproduce(recorded.run.path, "again", [], only_print=False) == 0
    assert commands[0][-3:] == ["name=again", f"runs_dir={recorded.folder / 'runs'}", "train.resume=never"]
    text = capsys.readouterr().out
    assert expected in text
    if "differ" in expected:
        *_, verb, before, after = shlex.split(text.splitlines()[-1])
        assert (verb, before, after) == ("compare", str(recorded.run.path), f"{recorded.folder}/runs/again")


def test_the_status_of_a_failed_training(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_child", lambda *_, **__: 3)
    assert reproduce(recorded.run.path, None, [], only_print=False) == 3
