"""The length of a run in epochs, as an alternative to steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.commands.plan.count.rank_client import RankClient, RankRequest
from megarl.errors import RecipeError
from megarl.preflight.environment import warmup_notice
from megarl.preflight.load import load_recipe
from megarl.preflight.run_setup import prepare_run
from megarl.recipe import to_yaml
from megarl.recipe.derived.epochs import with_steps
from megarl.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def length_of(recipe: Recipe) -> tuple[int, float | None]:
    return recipe.train.steps, recipe.train.epochs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steps.yaml").write_text("model: {path: model}\ntrain: {steps: 9}\n")
    (tmp_path / "epochs.yaml").write_text("base: steps.yaml\ntrain: {epochs: 3}\n")
    (tmp_path / "both.yaml").write_text("model: {path: model}\ntrain: {steps: 9, epochs: 3}\n")
    return tmp_path


def test_the_later_layer_counts(folder: Path) -> None:
    assert length_of(load_recipe(folder / "epochs.yaml")) == (1, 3.0)
    assert length_of(load_recipe(folder / "epochs.yaml", ["train.steps=5"])) == (5, None)
    assert length_of(load_recipe(folder / "epochs.yaml", ["train.epochs=null", "train.steps=5"])) == (5, None)
    assert length_of(load_recipe(folder / "steps.yaml", ["train.epochs=0.5"])) == (1, 0.5)


def test_both_in_one_layer_are_refused(folder: Path) -> None:
    for path, overrides in (("both.yaml", []), ("steps.yaml", ["train.steps=2", "train.epochs=2"])):
        with pytest.raises(
            RecipeError, match=r"train.steps sets the length of the run, too(.|\n)*leave one out"
        ) as caught:
            load_recipe(folder / path, overrides)
        assert caught.value.key == "train.epochs"
    with pytest.raises(RecipeError, match="must be above 0"):
        load_recipe(folder / "steps.yaml", ["train.epochs=0"])


def test_epochs_of_several_sets_are_refused(folder: Path) -> None:
    mix = "data.mix={a: {files: [a.parquet]}, b: {files: [b.parquet]}}"
    with pytest.raises(RecipeError, match=r"each set of data\.mix has separate epochs"):
        load_recipe(folder / "epochs.yaml", [mix])
    assert load_recipe(folder / "epochs.yaml", ["data.mix={a: {files: [a.parquet]}}"]).train.epochs == 3


def test_no_notice_is_made_of_an_unknown_number_of_steps(folder: Path) -> None:
    warmup = "actor.optimizer.warmup_steps=50"
    assert warmup_notice(load_recipe(folder / "steps.yaml", [warmup])) is not None
    assert warmup_notice(load_recipe(folder / "epochs.yaml", [warmup])) is None


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (3, 10), (0.1, 1), (2, 7)])
def test_every_row_is_drawn_in_each_epoch(epochs: float, steps: int) -> None:
    recipe = Recipe()
    recipe.train.epochs, recipe.data.prompts_per_step = epochs, 30
    resolved, (notice,) = with_steps(recipe, {"train": 100})
    assert length_of(resolved) == (steps, None)
    assert (
        notice
        == f"train.epochs = {epochs:g}: 100 rows with data.prompts_per_step = 30 are {steps} step{'s' * (steps > 1)}"
    )
    assert with_steps(resolved, {"train": 100}) == (resolved, [])


def test_epochs_are_the_written_decimal() -> None:
    recipe = Recipe()
    recipe.train.epochs, recipe.data.prompts_per_step = 1.1, 10  # 1.1 * 100 is above 110 in floating point
    assert with_steps(recipe, {"train": 100})[0].train.steps == 11


def test_a_run_records_its_steps(quickstart_data: Path, tmp_path: Path) -> None:
    names = [f"model.path={quickstart_data}/model", f"runs_dir={tmp_path}"]
    names += [
        f"data.{split}_files={quickstart_data}/data/{file}.parquet"
        for split, file in (("train", "train"), ("eval", "test"))
    ]
    setup = prepare_run(load_recipe(QUICKSTART, [*names, "train.epochs=1", "data.prompts_per_step=50"]))
    assert setup.recipe.train.steps == -(-len(setup.prepared.prompts or []) // 50) > 1
    assert any(notice.startswith("train.epochs = 1: ") for notice in setup.notices)
    resolved = yaml.safe_load(to_yaml(setup.recipe))["train"]
    assert (resolved["steps"], resolved["epochs"]) == (setup.recipe.train.steps, None)
    late = ["observe.profile_steps=[100000]", "observe.profile_ranks=[0]"]
    with pytest.raises(RecipeError, match="100000 is out of range"):  # known only with the rows
        prepare_run(load_recipe(QUICKSTART, [*names, "train.epochs=1", *late]))


def test_plan_counts_a_recipe_with_epochs() -> None:
    """The recipe of a counting process has every key, and one with `steps` and `epochs` would be refused."""
    recipe = Recipe()
    recipe.train.epochs = 2.0
    with RankClient() as client:
        file = RankRequest(recipe, 0).payload(client._file)["recipe"]
        assert load_recipe(file, check=False).model == recipe.model
