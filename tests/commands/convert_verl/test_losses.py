"""Losses with other defaults in megarl keep verl's values; `verl/trainer/ppo/core_algos.py` has its losses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError
from megarl.recipe.algorithm import AlgorithmConfig
from tests.commands.convert_verl.test_convert import GRPO


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., AlgorithmConfig]:
    def of(loss: str, *options: str) -> AlgorithmConfig:
        actor = "actor_rollout_ref.actor"
        command = [GRPO, f"{actor}.policy_loss.loss_mode={loss}", *(f"{actor}.{option}" for option in options)]
        (tmp_path / "recipe.yaml").write_text(convert(" ".join(command)).text)
        return load_recipe(tmp_path / "recipe.yaml").algorithm

    return of


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "geo_mean"])
def test_clip_bounds_are_verls_defaults(converted: Callable[..., AlgorithmConfig], loss: str) -> None:
    algorithm = converted(loss)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.2)


def test_clip_bounds_of_the_command_are_converted(converted: Callable[..., AlgorithmConfig]) -> None:
    algorithm = converted("gspo", "clip_ratio_low=3e-4", "clip_ratio_high=4e-4")
    assert (algorithm.clip_low, algorithm.clip_high) == (3e-4, 4e-4)


@pytest.mark.parametrize("mode", ["loss_agg_mode=token-mean", "entropy_coeff=0"])
@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_three_losses_are_means_over_sequences(converted: Callable[..., AlgorithmConfig], loss: str, mode: str) -> None:
    assert converted(loss, mode).aggregation == "seq_mean_token_mean"
    assert converted("vanilla", mode).aggregation == "token_mean"


def test_gspo_has_no_dual_clip(converted: Callable[..., AlgorithmConfig]) -> None:
    assert converted("gspo").dual_clip is None and converted("gspo", "clip_ratio_c=4.0").dual_clip is None
    assert converted("vanilla").dual_clip == 3.0


def test_kl_cov_has_verls_share_and_coefficient(converted: Callable[..., AlgorithmConfig]) -> None:
    assert (converted("kl_cov").cov_share, converted("kl_cov").cov_kl_coef) == (2e-4, 0.1)
    chosen = converted("kl_cov", "policy_loss.kl_cov_ratio=0.002", "policy_loss.ppo_kl_coef=1.0")
    assert (chosen.cov_share, chosen.cov_kl_coef) == (2e-3, 1.0)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("loss", "share"), [("clip_cov", 0.01), ("kl_cov", 0.02)])
def test_the_covariance_ratio_belongs_to_the_loss(
    converted: Callable[..., AlgorithmConfig], loss: str, share: float, order: int
) -> None:
    options = ["policy_loss.clip_cov_ratio=0.01", "policy_loss.kl_cov_ratio=0.02"][::order]
    assert converted(loss, *options).cov_share == share


def test_a_loss_after_the_file_has_its_own_settings(tmp_path: Path) -> None:
    """Values of the script's loss are dropped, and values of the user's loss are kept."""

    def algorithm(script: str, *arguments: str) -> AlgorithmConfig:
        (tmp_path / "recipe.yaml").write_text(convert(script, arguments).text)
        return load_recipe(tmp_path / "recipe.yaml").algorithm

    assert algorithm(GRPO, "algorithm.loss=cispo").loss == "cispo"
    ratio = "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.01"
    assert algorithm(f"{GRPO} {ratio}", "algorithm.loss=clip_cov").cov_share == 0.01
    assert algorithm(GRPO, "algorithm.loss=kl_cov").cov_share == 2e-4
    with pytest.raises(InputError, match=r"algorithm\.dual_clip"):
        convert(GRPO, ["algorithm.loss=cispo", "algorithm.dual_clip=2"])
    for wrong in ("nothing", "[a]", "null"):
        with pytest.raises(InputError, match=r"algorithm\.loss"):
            convert(GRPO, [f"algorithm.loss={wrong}"])


def test_gpg_is_the_plain_policy_gradient_with_the_papers_alpha(converted: Callable[..., AlgorithmConfig]) -> None:
    assert converted("gpg").loss == "reinforce"
    notes = convert(GRPO.replace("adv_estimator=grpo", "adv_estimator=gpg")).notes
    assert any("alpha is the paper's" in note for note in notes)


def test_an_unused_option_has_a_note() -> None:
    actor = "actor_rollout_ref.actor"
    notes = convert(
        f"{GRPO} {actor}.policy_loss.loss_mode=gspo {actor}.loss_agg_mode=token-mean {actor}.clip_ratio_c=4"
    )
    assert re.search(r"loss_agg_mode=token-mean: not used: verl's gspo", "\n".join(notes.notes))
    assert re.search(r"clip_ratio_c=4: not used: verl's gspo has no dual clip", "\n".join(notes.notes))
