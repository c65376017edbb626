"""Recipes with former names of keys and values load as before, with a warning that names the present ones."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megarl.cli import app
from megarl.errors import RecipeError
from megarl.preflight.load import load_recipe
from megarl.recipe.former_names import FormerNameWarning
from megarl.recipe.load import read_recipe
from megarl.recipe.text import flat_settings


def written(folder: Path, text: str) -> Path:
    path = folder / "former.yaml"
    path.write_text(text)
    return path


def test_a_former_section_and_value_are_read_with_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "exchange: {route: planned, timeout: 99}\n")
    with pytest.warns(FormerNameWarning) as seen:
        recipe = load_recipe(path, check=False)
    assert (recipe.weight_sync.route, recipe.weight_sync.timeout) == ("sharded", 99)
    assert [str(warning.message).removeprefix(f"{path}: ") for warning in seen] == [
        "the section exchange is now weight_sync; the former name still works",
        "weight_sync.route=planned is now weight_sync.route=sharded; the former name still works",
    ]


def test_a_former_value_under_the_present_key_is_read(tmp_path: Path) -> None:
    with pytest.warns(FormerNameWarning, match="route=export is now weight_sync.route=full"):
        assert load_recipe(written(tmp_path, "weight_sync: {route: export}\n"), check=False).weight_sync.route == "full"


def test_former_keys_of_a_base_and_present_keys_of_a_recipe_merge(tmp_path: Path) -> None:
    written(tmp_path, "exchange: {silence: 20, timeout: 99}\n")
    child = tmp_path / "child.yaml"
    child.write_text("base: former.yaml\nweight_sync: {timeout: 77}\n")
    with pytest.warns(FormerNameWarning):
        reading = read_recipe(child, ["exchange.bucket_mb=8"])
    settings = reading.recipe.weight_sync
    assert (settings.silence, settings.timeout, settings.bucket_mb) == (20, 77, 8) and not reading.errors
    assert reading.origins["weight_sync.silence"] == str(tmp_path / "former.yaml")
    assert reading.origins["weight_sync.bucket_mb"] == "command line"


@pytest.mark.filterwarnings("ignore::megarl.recipe.former_names.FormerNameWarning")
def test_a_key_under_both_names_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "exchange: {timeout: 99}\nweight_sync: {timeout: 98}\n")
    with pytest.raises(
        RecipeError, match=r"(?s)exchange.timeout = 99.*weight_sync.timeout is the same key.*delete one"
    ):
        read_recipe(path)
    conflict = ["exchange.route=planned", "weight_sync.route=full", "no_equals"]
    errors = read_recipe(written(tmp_path, "name: x\n"), conflict).errors
    assert [error.setting for error in errors] == ["no_equals", "exchange.route = 'planned'"]


@pytest.mark.filterwarnings("ignore::megarl.recipe.former_names.FormerNameWarning")
@pytest.mark.parametrize(
    ("former", "present"), [("{route: full}", "foo"), ("{route: full}", "null"), ("3", "{silence: 9}")]
)
def test_two_sections_of_which_one_is_none_are_refused(tmp_path: Path, former: str, present: str) -> None:
    with pytest.raises(RecipeError, match=r"(?s)exchange = .*weight_sync is the same section"):
        read_recipe(written(tmp_path, f"exchange: {former}\nweight_sync: {present}\n"))


def test_an_empty_former_section_changes_nothing(tmp_path: Path) -> None:
    reading = read_recipe(written(tmp_path, "exchange:\nweight_sync: {route: full}\n"))
    assert reading.recipe.weight_sync.route == "full" and not reading.errors


def test_a_bracket_that_is_not_closed_is_an_error(tmp_path: Path) -> None:
    (error,) = read_recipe(written(tmp_path, "name: x\n"), ["[weight_sync=full"]).errors
    assert error.problem.startswith("the value does not parse")


@pytest.mark.filterwarnings("ignore::megarl.recipe.former_names.FormerNameWarning")
@pytest.mark.parametrize("section", ["null", "3", "[a]", "{route: [planned]}", "{rote: auto}"])
def test_a_wrong_value_of_a_former_section_is_an_error_of_the_present_one(tmp_path: Path, section: str) -> None:
    (error,) = read_recipe(written(tmp_path, f"exchange: {section}\n")).errors
    assert error.key.startswith("weight_sync")


def test_a_recipe_in_a_run_directory_is_compared_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flat_settings("exchange: {route: export, timeout: 9}") == {
            "weight_sync.route": "full",
            "weight_sync.timeout": 9,
        }


def test_the_command_line_prints_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "exchange: {timeout: 99}\ntrain: {steps: 0}\n")
    command = [sys.executable, "-m", "megarl", "weight-sync", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first == f"notice: {path}: the section exchange is now weight_sync; the former name still works"


def test_the_former_command_names_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match=r"nowhere.yaml does not exist"):
        app(args=["exchange", "nowhere.yaml", "--explain"], standalone_mode=False)
    assert "megarl exchange is now megarl weight-sync" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("former", "limits"),
    [
        ({"mask": "token"}, {"token_ratio": [0.5, 5.0]}),
        ({"mask": "geometric", "mask_low": 0.9, "mask_high": 1.1}, {"mean_ratio": [0.9, 1.1]}),
        ({"mask": "sequence", "veto": 1e-4}, {"sequence_ratio": [0.5, 5.0], "worst_ratio": [1e-4, None]}),
        ({"veto": 1e-4, "reject": {"mean_k3": 0.1}}, {"worst_ratio": [1e-4, None], "mean_k3": 0.1}),
        ({"mask": "none", "mask_low": 0.5, "mask_high": 5.0, "veto": None}, {}),  # the defaults of an older checkpoint
    ],
)
def test_masks_and_veto_of_corrections_are_criteria(tmp_path: Path, former: dict[str, object], limits: dict) -> None:
    path = written(tmp_path, json.dumps({"algorithm": {"correction": {"weights": "token", **former}}}))
    with pytest.warns(FormerNameWarning, match=r"is now algorithm.correction.reject="):
        correction = read_recipe(path).recipe.algorithm.correction
    assert correction.reject == limits and correction.weights == "token"


def test_bounds_without_a_mask_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm: {correction: {mask_low: 0.1}}\n")
    with pytest.raises(RecipeError, match=r"(?s)algorithm.correction.mask_low = 0.1.*reject replaces it.*token_ratio"):
        read_recipe(path)
