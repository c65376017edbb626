"""The command that `megarl rehearse` prints to repeat a failure."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.commands.doctor.recipe import run_name
from megarl.commands.rehearse import command
from megarl.commands.rehearse.tiny_copy import make_tiny_copy
from megarl.observe.run_dir import RunDirectory

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("statuses", [(1,), (0, 1)], ids=["first run", "resume"])
def test_the_command_of_a_failed_rehearsal_repeats_the_failure(
    statuses: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's folder holds step 1 by then, and the copy has `train.resume: never`: plain `megarl train` would refuse it."""
    recipe = ROOT / "recipes" / "quickstart_sft.yaml"
    tiny = make_tiny_copy(recipe, [], tmp_path / "a folder", processes=None, shape=None)
    commands: list[list[str]] = []

    def failing(words: list[str], environ: dict[str, str]) -> int:
        run = RunDirectory(Path(tiny.recipe.runs_dir) / tiny.recipe.name)
        run.path.mkdir(parents=True, exist_ok=True)
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
        commands.append(words)
        return statuses[len(commands) - 1]

    monkeypatch.setattr(command, "run_child", failing)
    status, repeat = command.train_copy(tiny, resume=True)
    path, *overrides = shlex.split(repeat)[shlex.split(repeat).index("train") + 1 :]
    assert status == 1 and len(commands) == len(statuses) and path == str(tiny.path)
    again = load_recipe(path, overrides)
    assert run_name(again).status == "ok", "train would refuse this command"
    assert run_name(load_recipe(path)).status == "warning", "it refuses this one"
    failed = load_recipe(path, commands[-1][5:])
    again.name = failed.name
    assert again == failed
