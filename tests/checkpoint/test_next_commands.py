"""The checkpoint that a failed run names, and the commands that a finished run names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.checkpoint.next_commands import Repetition, after_training, naming_checkpoint
from megarl.errors import SpoiledWeights
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from tests.support.checkpoint_parts import saver, state


@pytest.mark.parametrize("error", [SpoiledWeights("resume from step 3"), RuntimeError("the machine burns")])
def test_an_error_that_names_a_checkpoint_gets_no_note_on_the_last_one(error: Exception, tmp_path: Path) -> None:
    """The last checkpoint may hold the spoiled weights."""
    saver(tmp_path).save(7, state([], []))
    directory = cast(Any, SimpleNamespace(checkpoints=tmp_path, journal=tmp_path / "journal"))
    with pytest.raises(type(error)) as raised, naming_checkpoint(Recipe(), directory):
        raise error
    notes = getattr(raised.value, "__notes__", [])
    assert [note.split(",")[0] for note in notes] == (
        [] if isinstance(error, SpoiledWeights) else ["Last intact checkpoint: step 7"]
    )


@pytest.mark.parametrize(
    ("program", "command"),
    [("/home/me/.local/bin/megarl", "megarl"), ("/opt/megarl/megarl/__main__.py", "python -m megarl")],
)
def test_commands_are_named_as_megarl_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, command: str
) -> None:
    """After `uv tool install`, the shell's python has no module megarl."""
    monkeypatch.setattr(sys, "argv", [program, "train", "mine.yaml"])
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "mine")
    (run.path / "hf").mkdir(parents=True)
    assert after_training(Recipe(), run)[-1] == f"  {command} report runs/mine"


def test_commands_of_a_run_with_spaces_run_in_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["megarl"])
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "my run")
    (run.path / "hf").mkdir(parents=True)
    assert after_training(Recipe(), run)[-1] == "  megarl report 'runs/my run'"
    advice = Repetition(run, has_tape=False, checkpoint=None).advice(3)
    assert advice.endswith("megarl train 'runs/my run/recipe.resolved.yaml' name=repeated train.resume=never")
    advice = Repetition(run, has_tape=True, checkpoint=None).advice(3)
    assert "megarl replay 'runs/my run' --bundle step.tar" in advice
