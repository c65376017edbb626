"""Paths of a recipe mean the same in every process."""

from pathlib import Path

from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import Recipe


def test_set_paths_become_absolute_and_unset_paths_stay_none(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    recipe = Recipe(runs_dir="runs")
    recipe.model.path, recipe.weight_sync.directory, recipe.data.train_files = "~/model", "weights", ["a.parquet"]
    recipe.reward.function, recipe.reward.functions = "~/mine.py:score", {"mine:score": 1.0, "b.py:f": 2.0, "math": 3.0}
    recipe.agent.tools = ["code_interpreter", "mine:look_up", "verl/tools.yaml", "tools.py:search"]
    absolute = with_absolute_paths(recipe)
    assert absolute.agent.tools[:2] == ["code_interpreter", "mine:look_up"]
    assert absolute.agent.tools[2:] == [f"{tmp_path}/verl/tools.yaml", f"{tmp_path}/tools.py:search"]
    assert absolute.reward.function == "/home/me/mine.py:score"
    assert absolute.reward.functions == {"mine:score": 1.0, f"{tmp_path}/b.py:f": 2.0, "math": 3.0}
    assert (absolute.runs_dir, absolute.weight_sync.directory) == (str(tmp_path / "runs"), str(tmp_path / "weights"))
    assert (absolute.model.path, absolute.data.train_files) == ("/home/me/model", [str(tmp_path / "a.parquet")])
    assert (
        absolute.model.tokenizer is None and absolute.judge.path is None and with_absolute_paths(absolute) == absolute
    )
