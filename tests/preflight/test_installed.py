"""A recipe whose engine is not installed is refused before trainers start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import engines
from megarl.errors import RecipeError
from megarl.preflight.engines_and_devices import check_installed
from megarl.preflight.load import load_recipe
from megarl.preflight.run_setup import prepare_run
from megarl.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def only_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages of a machine without SGLang."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(engines, "package_folder", {"vllm": tmp_path}.get)


def test_the_section_of_a_missing_engine_is_named() -> None:
    recipe = Recipe()
    check_installed(recipe)
    recipe.reward.function, recipe.judge.path, recipe.judge.engine = "judge", "model", "sglang"
    with pytest.raises(RecipeError, match=re.escape("the package sglang is not installed in")) as error:
        check_installed(recipe)
    assert error.value.key == "judge.engine"
    recipe.train.source, recipe.reward.function = "sft", None
    check_installed(recipe)


def test_nodes_of_a_cluster_may_have_other_packages_than_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe()
    recipe.rollout.engine, recipe.cluster.ray_address = "sglang", "head:6379"
    check_installed(recipe)
    recipe.cluster.ray_address = None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_installed(recipe)


def test_a_run_does_not_start_without_its_engine(
    quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "package_folder", lambda _: None)
    names = [f"model.path={quickstart_data}/model", f"runs_dir={tmp_path / 'runs'}"]
    names += [
        f"data.{split}_files={quickstart_data}/data/{file}.parquet"
        for split, file in (("train", "train"), ("eval", "test"))
    ]
    with pytest.raises(RecipeError, match=re.escape("the package vllm is not installed")):
        prepare_run(load_recipe(QUICKSTART, names))
    assert not (tmp_path / "runs").exists()
