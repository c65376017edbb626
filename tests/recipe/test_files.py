"""Files of recipes, which are parsed once, and data files that a recipe names."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.former_names import FormerNameWarning
from megarl.recipe.text import hardware_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.yaml").write_text("model: {path: some/model}\n")
    (tmp_path / "base" / "lr.yaml").write_text("rollout: {temperature: 0.6}\n")
    (tmp_path / "recipe.yaml").write_text("base: [base/model.yaml, base/lr.yaml]\n")
    return tmp_path


def refused(folder: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder / "recipe.yaml", overrides)
    return caught.value


def test_a_file_that_was_edited_is_read_anew(folder: Path) -> None:
    base = folder / "base" / "lr.yaml"
    for temperature in (0.6, 0.7, 0.8):  # texts of one length
        base.write_text(f"rollout: {{temperature: {temperature}}}\n")
        assert load_recipe(folder / "recipe.yaml").rollout.temperature == temperature


def test_reading_a_file_again_gives_the_same_recipe_and_warnings(folder: Path) -> None:
    (folder / "base" / "lr.yaml").write_text("exchange: {route: export}\n")
    for _ in range(2):
        with pytest.warns(FormerNameWarning) as caught:
            recipe = load_recipe(folder / "recipe.yaml")
        assert len(caught) == 2 and recipe.weight_sync.route == "full" and recipe.model.path == "some/model"


def test_a_file_that_is_not_text_is_named(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    error = refused(folder)
    assert error.problem.startswith("this is not text in UTF-8") and error.origin == str(folder / "recipe.yaml")
    assert hardware_of(folder / "recipe.yaml") is None


@pytest.mark.parametrize(
    ("file", "problem", "remedy"),
    [
        ("~/a.parquet", "~ is not expanded", f"write {Path.home()}/a.parquet"),
        ("data/*.jsonl", "patterns are not expanded", "list the files"),
        (".", "this is a folder", "list its files"),
    ],
)
def test_data_files_are_files(folder: Path, file: str, problem: str, remedy: str) -> None:
    error = refused(folder, f"data.train_files=['{file}']")
    assert (error.key, error.problem, error.remedy) == ("data.train_files", problem, remedy)
