"""Messages for a new user: the end of a run, how to resume, and a machine that is too busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from megarl.checkpoint.next_commands import after_interruption, after_training
from megarl.commands.quickstart import RL_RECIPE, SFT_RECIPE
from megarl.errors import ProcessFailure, RecipeError
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.load import load_recipe
from megarl.preflight.models import read_hf_config
from megarl.recipe.schema import Recipe
from tests.support.checkpoint_parts import saver, state
from tests.support.cluster_workers import ROOT


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.name, recipe.train.source, recipe.data.eval_files = "mine", "rollout", ["/data/test.parquet"]
    return recipe


def run_with(folder: Path, *names: str, steps: tuple[int, ...] = ()) -> RunDirectory:
    run = RunDirectory(folder / "runs" / "mine")
    for name in names:
        (run.path / name).mkdir(parents=True) if name == "hf" else (run.path / name).write_text("")
    for step in steps:
        saver(run.checkpoints).save(step, state())
    return run


def test_a_finished_run_prints_its_paths_and_the_next_commands(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, "hf", "report.html", steps=(5, 10))
    monkeypatch.chdir(tmp_path)
    assert after_training(recipe, run) == [
        "mine: finished",
        "  run         runs/mine",
        "  report      runs/mine/report.html",
        "  checkpoint  runs/mine/checkpoints/step_000010",
        "  model       runs/mine/hf",
        "next:",
        "  python -m megarl eval runs/mine/recipe.resolved.yaml model.path=runs/mine/hf",
    ]


def test_a_run_without_an_exported_model_suggests_the_export(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, steps=(3,))
    lines = after_training(recipe, run)
    assert f"  python -m megarl export {run.path} --out models/mine" in lines, "from another folder: the whole path"
    assert f"  python -m megarl eval {run.recipe} model.path=models/mine" in lines
    assert f"  python -m megarl report {run.path}" in lines, "observe.report was off"
    recipe.train.source = "sft"
    assert not [line for line in after_training(recipe, run) if " eval " in line], (
        "eval samples; SFT has the loss alone"
    )


def test_a_run_without_saved_weights_prints_that(recipe: Recipe, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "mine")
    lines = after_training(recipe, run)
    assert "no weights were saved" in lines[2] and not [line for line in lines if "export " in line]
    assert "same command with train.resume=auto" in after_interruption(recipe, run)[-1]


@pytest.mark.parametrize(
    "error, words, tries_again",
    [
        (
            Exception("The current node timed out during startup."),
            r"runnable processes on \d+ cores.*load is lower",
            True,
        ),
        (ValueError("the amount of memory on this node available (0.02 GB)"), r"has \d+\.\d GB of memory left", False),
    ],
)
def test_a_machine_too_busy_for_ray_is_reported(
    error: Exception, words: str, tries_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.restarts` tries again when the load may be lower: a restart after a failure must not end the run."""
    from megarl.cluster.orphan_reaper import OrphanReaper
    from megarl.cluster.ray import start

    def fails(**_: object) -> NoReturn:
        raise error  # in Ray's words

    monkeypatch.setattr(start.ray, "init", fails)
    monkeypatch.setattr(OrphanReaper, "env", {}, raising=False)
    with pytest.raises(RuntimeError, match=words) as raised:
        start._start_private(OrphanReaper.__new__(OrphanReaper))
    assert isinstance(raised.value, ProcessFailure) == tries_again


def test_the_quickstart_accepts_debug() -> None:
    """The quickstart's errors suggest --debug."""
    command = [sys.executable, "-m", "megarl", "quickstart", "--debug", "train.step=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "train.steps" in done.stderr and "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"num_hidden_layers": 1000000000}', "num_hidden_layers 1000000000, and megarl reads 0 to 10,000"),
        ('{"text_config": {"hidden_size": -5}}', "hidden_size -5"),
        ('{"vocab_size": 1e99}', "vocab_size 1e"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_damaged_config_is_refused_in_seconds(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecipeError, match=words):
        read_hf_config(str(tmp_path))


def test_a_missing_quickstart_model_names_the_command_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy names neither the recipe that needs the model nor files of a clone, which an installed wheel lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/bin/megarl"])
    advice = {}
    for path in ("data/quickstart/model", "runs/quickstart-sft/hf", "models/Qwen3-8B"):
        with pytest.raises(RecipeError, match="the directory does not exist") as error:
            read_hf_config(str(tmp_path / path))
        advice[path] = error.value.remedy
    assert advice["data/quickstart/model"] == "run `megarl data quickstart --out data/quickstart` to make it"
    assert advice["runs/quickstart-sft/hf"] == "run `megarl quickstart`, whose SFT run makes it"
    assert "quickstart" not in advice["models/Qwen3-8B"]
    assert load_recipe(str(ROOT / "recipes" / SFT_RECIPE)).model.path.endswith("data/quickstart/model")
    assert load_recipe(str(ROOT / "recipes" / RL_RECIPE)).model.path.endswith("runs/quickstart-sft/hf")


LOST = """
import os, signal, sys, time
from megarl.cli import guarded, leave

class Holder:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(0.2)

def command():
    Holder()
    time.sleep(20)

leave(guarded(command, debug=False))
"""


@pytest.mark.parametrize(("name", "status", "words"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_an_interrupt_in_a_finalizer_is_not_lost(name: str, status: int, words: str) -> None:
    """Python drops exceptions in finalizers and fork hooks, and Ray's start runs some of these."""
    command = [sys.executable, "-c", LOST, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (status, f"stopped by {words}")
