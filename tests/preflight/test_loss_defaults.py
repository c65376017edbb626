"""Losses with other defaults than the schema: they apply to settings that a recipe leaves open."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megarl import load_recipe
from megarl.algorithms.catalogue import LOSSES
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.environment import environment_notices, loss_notice
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.text import to_yaml

ROOT = Path(__file__).resolve().parents[2]
WORD_PROBLEMS = ROOT / "recipes" / "base" / "word_problems.yaml"
WITH_DEFAULTS = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq_mean_token_mean"},
    "sapo": {"aggregation": "seq_mean_token_mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dppo_tv": {"clip_low": 0.15, "clip_high": 0.15},
    "dro": {"log_ratio_coef": 0.5},
    "kl_cov": {"cov_share": 2e-3},
    "gvpo": {"aggregation": "seq_mean_token_mean"},
    "sppo": {"aggregation": "seq_mean_token_mean"},
}
OTHERS = {
    "log_ratio_coef": 0.25,
    "clip_low": 0.05,
    "clip_high": 0.06,
    "aggregation": "seq_mean_token_sum",
    "cov_share": 0.5,
}
"""Values that no loss has as defaults."""


def recipe_file(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(f"base: {WORD_PROBLEMS}\n{text}\n")
    return folder / "recipe.yaml"


def read(algorithm: AlgorithmConfig, names: Any) -> dict[str, Any]:
    return {name: getattr(algorithm, name) for name in names}


def test_losses_have_the_listed_defaults() -> None:
    assert {name: dict(LOSSES[name].defaults) for name in LOSSES.names() if LOSSES[name].defaults} == WITH_DEFAULTS


@pytest.mark.parametrize("loss", WITH_DEFAULTS)
class TestRecipe:
    def test_unset_settings_get_the_losss_defaults(self, loss: str, tmp_path: Path) -> None:
        recipe = load_recipe(recipe_file(tmp_path, f"algorithm: {{loss: {loss}}}"))
        assert read(recipe.algorithm, WITH_DEFAULTS[loss]) == WITH_DEFAULTS[loss]
        by_command = load_recipe(recipe_file(tmp_path, ""), [f"algorithm.loss={loss}"])
        assert by_command.algorithm == recipe.algorithm

    def test_the_base_recipe_sets_the_same_values(self, loss: str) -> None:
        names = {"dppo_tv": "dppo", "gspo_token": "gspo"}
        content: Any = OmegaConf.to_container(
            OmegaConf.load(ROOT / "recipes" / "base" / f"{names.get(loss, loss)}.yaml")
        )
        algorithm = content["algorithm"]
        assert {name: algorithm[name] for name in WITH_DEFAULTS[loss]} == WITH_DEFAULTS[loss]

    def test_a_resolved_recipe_does_not_change(self, loss: str, tmp_path: Path) -> None:
        """A run's directory has a recipe with every key; reading it gives the same settings."""
        recipe = load_recipe(recipe_file(tmp_path, f"algorithm: {{loss: {loss}, clip_low: 0.05}}"), check=False)
        (tmp_path / "resolved.yaml").write_text(to_yaml(recipe))
        assert load_recipe(tmp_path / "resolved.yaml", check=False).algorithm == recipe.algorithm

    def test_a_notice_names_the_values(self, loss: str, tmp_path: Path) -> None:
        recipe = load_recipe(recipe_file(tmp_path, f"algorithm: {{loss: {loss}}}"))
        (notice,) = [text for text in environment_notices(recipe, CPUPlatform()) if text.startswith("algorithm.loss=")]
        for name, value in WITH_DEFAULTS[loss].items():
            assert f"{name} {value}" in notice
        assert "default" not in notice
        for name in WITH_DEFAULTS[loss]:
            setattr(recipe.algorithm, name, OTHERS[name])
        other = loss_notice(recipe.algorithm)
        assert other is not None
        for name, value in WITH_DEFAULTS[loss].items():
            assert f"{name} {OTHERS[name]} (default of this loss: {value})" in other


@pytest.mark.parametrize(
    ("loss", "name"),
    [(loss, name) for loss in WITH_DEFAULTS if not LOSSES[loss].whole_groups for name in WITH_DEFAULTS[loss]],
)
def test_an_explicit_value_overrides_the_losss_default(loss: str, name: str, tmp_path: Path) -> None:
    """From the file, a base file or the command line, also if it equals the schema's default. Losses of whole groups have one
    aggregation."""
    path = recipe_file(tmp_path, f"algorithm: {{loss: {loss}, {name}: {OTHERS[name]}}}")
    assert getattr(load_recipe(path).algorithm, name) == OTHERS[name]
    schema_default = getattr(AlgorithmConfig(), name)
    for value in (OTHERS[name], schema_default):
        changed = load_recipe(path, [f"algorithm.{name}={value}"])
        assert getattr(changed.algorithm, name) == value
    child = tmp_path / "child.yaml"
    child.write_text(f"base: {path}\n")
    assert getattr(load_recipe(child).algorithm, name) == OTHERS[name]


def test_other_losses_have_the_defaults_of_the_schema_and_no_notice(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "algorithm: {loss: ppo_clip}"))
    assert read(recipe.algorithm, OTHERS) == read(AlgorithmConfig(), OTHERS)
    assert loss_notice(recipe.algorithm) is None


@pytest.mark.parametrize("check", [True, False])
def test_a_loss_of_a_user_may_have_defaults(check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loss_with_defaults.py").write_text(
        "from megarl.algorithms.losses import policy_loss\n"
        "@policy_loss('mine_with_defaults', needs_old_log_probs=True, settings=('clip_low',), defaults={'clip_low': 0.07})\n"
        "def mine(inputs, settings):\n"
        "    return -inputs.advantages * inputs.log_probs, {}\n"
    )
    try:
        text = "algorithm: {loss: mine_with_defaults, modules: [loss_with_defaults]}"
        assert load_recipe(recipe_file(tmp_path, text), check=check).algorithm.clip_low == 0.07
    finally:
        sys.modules.pop("loss_with_defaults", None)
        LOSSES._entries.pop("mine_with_defaults", None)


def test_an_unknown_loss_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        load_recipe(recipe_file(tmp_path, "algorithm: {loss: gspoo}"))
