"""Options of the algorithm are converted as verl reads them, or refused.

Sources: verl main of August 2026, verl/trainer/config/ and verl/trainer/ppo/{core_algos,rollout_corr_helper}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.commands.convert_verl.command import Converted, convert
from megarl.errors import InputError
from megarl.recipe.schema import Recipe
from tests.commands.convert_verl.test_convert import GRPO

CORRECTION = "algorithm.rollout_correction"


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    def of(*options: str) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(converted(*options).text)
        return load_recipe(tmp_path / "recipe.yaml")

    return of


def converted(*options: str, **more: object) -> Converted:
    return convert(" ".join([GRPO, *options]), **more)  # type: ignore[arg-type]


class TestModelEngine:
    def test_megatron_has_the_layout_of_its_options(self, recipe: Callable[..., Recipe]) -> None:
        size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
        megatron = recipe("model_engine=megatron", size).megatron
        assert (megatron.tensor_parallel, megatron.recompute) == (4, "none")
        assert not any("FSDP" in note for note in converted("model_engine=megatron", size).notes)

    def test_without_it_the_actor_uses_fsdp(self) -> None:
        assert any("the actor uses FSDP" in note for note in converted().notes)
        assert any("the actor uses FSDP" in note for note in converted("model_engine=veomni").notes)


def test_engines_have_verls_limits(recipe: Callable[..., Recipe]) -> None:
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    assert limits.items() <= recipe().rollout.engine_args.items()
    assert recipe("actor_rollout_ref.rollout.max_num_seqs=64").rollout.engine_args["max_num_seqs"] == 64


def test_fixed_micro_batches_are_shared_by_context_parallel_devices(recipe: Callable[..., Recipe]) -> None:
    actor = "actor_rollout_ref.actor"
    options = ["model_engine=megatron", f"{actor}.use_dynamic_bsz=False", f"{actor}.ppo_micro_batch_size_per_gpu=2"]
    alone = recipe(*options).actor.max_tokens_per_micro_batch
    shared = recipe(*options, f"{actor}.megatron.context_parallel_size=2").actor.max_tokens_per_micro_batch
    assert alone == 2 * shared


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=new_loss", "algorithm.loss=VALUE after the file"),
        ("algorithm.adv_estimator=new_estimator", "algorithm.advantage=VALUE after the file"),
        ("actor_rollout_ref.actor.loss_agg_mode=new-mean", "algorithm.aggregation=VALUE"),
        ("actor_rollout_ref.actor.policy_loss.new_key=1", "unknown option"),
        ("algorithm.new_key=1", "unknown option"),
        ("actor_rollout_ref.actor.loss_agg_mod=token-mean", "nearest: actor_rollout_ref.actor.loss_agg_mode"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "actor.optimizer.decay=VALUE"),
    ],
)
def test_an_option_that_changes_the_algorithm_is_carried_over_or_refused(option: str, words: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InputError, match=rf"The recipe would compute something else: .*--accept {name}") as caught:
        converted(option)
    assert words in str(caught.value) and f"{option}: " in str(caught.value)
    assert any(name in note for note in converted(option, accepted=[name]).notes)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_compares_positions(recipe: Callable[..., Recipe], name: str) -> None:
    """verl's estimators for one turn and for several differ in the positions of tool output, which megarl skips."""
    options = [f"algorithm.adv_estimator={name}", "actor_rollout_ref.actor.calculate_sum_pi_squared=True"]
    algorithm = recipe(*options).algorithm
    assert (algorithm.advantage, algorithm.tail_baseline) == ("optimal_token_baseline", "zero")
    notes = converted(*options).notes
    assert any("positions skip tool output" in note for note in notes) == (name == "optimal_token_baseline")


def test_a_setting_after_the_file_replaces_an_unknown_value() -> None:
    option = "actor_rollout_ref.actor.policy_loss.loss_mode=new_loss"
    assert "loss: gspo" in converted(option, arguments=["algorithm.loss=gspo"]).text


@pytest.mark.parametrize(
    ("criteria", "limits", "expected"),
    [
        # verl's k1 is log p(engine) / p(trainer): its interval of that ratio is the inverse of ours.
        ("token_k1", "0.5_2.5", {"token_ratio": [0.4, 2.0]}),
        ("seq_sum_k1", "4.0", {"sequence_ratio": [0.25, 4.0]}),
        ("seq_mean_k1", "0.8_1.25", {"mean_ratio": [0.8, 1.25]}),
        ("seq_mean_k3", "0.01", {"mean_k3": 0.01}),
        ("'token_k1,seq_max_k2'", "'0.5_2.0,2.5'", {"token_ratio": [0.5, 2.0], "worst_k2": 2.5}),
        ("'token_k2,token_k2,token_k2'", "'3.0,0.5,2.0'", {"token_k2": 0.5}),
        ("'token_k2,seq_sum_k3'", "0.3", {"token_k2": 0.3, "sequence_k3": 0.3}),
    ],
)
def test_rejection(recipe: Callable[..., Recipe], criteria: str, limits: str, expected: dict[str, object]) -> None:
    correction = recipe(
        f"{CORRECTION}.rollout_rs={criteria}", f"{CORRECTION}.rollout_rs_threshold={limits}"
    ).algorithm.correction
    assert correction.reject == expected


def test_rejection_of_older_versions(recipe: Callable[..., Recipe]) -> None:
    """Until January 2026: a level, bounds of p(trainer) / p(engine) in two options, and a veto."""
    older = {"rollout_rs": "geometric", "rollout_rs_threshold": "1.01", "rollout_rs_threshold_lower": "0.98"}
    veto = f"{CORRECTION}.rollout_token_veto_threshold=1e-4"
    options = [f"{CORRECTION}.{name}={value}" for name, value in older.items()]
    assert recipe(*options, veto).algorithm.correction.reject == {
        "mean_ratio": [0.98, 1.01],
        "worst_ratio": [1e-4, None],
    }
    assert recipe(*options[:2]).algorithm.correction.reject == {"mean_ratio": [1 / 1.01, 1.01]}


def test_a_threshold_of_two_bounds_is_icepop(recipe: Callable[..., Recipe]) -> None:
    options = [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_4.0"]
    correction = recipe(*options).algorithm.correction
    assert (correction.weights, correction.truncate, correction.reject) == ("token", 4.0, {"token_ratio": [0.5, 4.0]})


@pytest.mark.parametrize(
    ("option", "limits", "words"),
    [
        ("rollout_rs=token_k4", "0.1", "verl has no criterion token_k4"),
        ("rollout_rs=seq_max_k1", "0.1", "verl has no criterion seq_max_k1"),
        ("rollout_rs=seq_mean_k3", "0.5_2.0", "the limit of seq_mean_k3 is one number"),
        ("rollout_rs=token_k2", "-1", "neither a limit above 0 nor LOW_HIGH"),
        ("rollout_rs='token_k1,token_k2,token_k3'", "'0.5_2.0,0.1'", "3 criteria, and rollout_rs_threshold 2 limits"),
    ],
)
def test_criteria_that_verl_refuses(option: str, limits: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        converted(f"{CORRECTION}.{option}", f"{CORRECTION}.rollout_rs_threshold={limits}")


def test_bypass_mode_has_the_loss_of_its_type(recipe: Callable[..., Recipe]) -> None:
    bypass = [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"]
    algorithm = recipe(*bypass).algorithm
    assert (algorithm.loss, algorithm.old_log_probs, algorithm.correction.weights) == ("ppo_clip", "rollout", "none")
    normalize = f"{CORRECTION}.rollout_is_batch_normalize=True"
    assert not recipe(*bypass, normalize).algorithm.correction.normalize
    assert any(f"{normalize}: not used" in note for note in converted(*bypass, normalize).notes)
    algorithm = recipe(*bypass, f"{CORRECTION}.loss_type=reinforce").algorithm
    assert (algorithm.loss, algorithm.correction.weights) == ("reinforce", "token")
    with pytest.raises(InputError, match="loss_type=other is neither"):
        recipe(*bypass, f"{CORRECTION}.loss_type=other")


class TestLosses:
    def test_dro(self, recipe: Callable[..., Recipe]) -> None:
        loss = "actor_rollout_ref.actor.policy_loss.loss_mode=dro"
        algorithm = recipe(loss, "actor_rollout_ref.actor.policy_loss.dro_beta=0.3").algorithm
        assert (algorithm.loss, algorithm.log_ratio_coef) == ("dro", 0.15)
        with pytest.raises(InputError, match="loss_mode=dro needs "):
            recipe(loss)

    def test_dppo_has_verls_cap(self, recipe: Callable[..., Recipe]) -> None:
        algorithm = recipe("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv").algorithm
        assert (algorithm.loss, algorithm.ratio_cap, algorithm.clip_low) == ("dppo_tv", 3.0, 0.2)

    def test_sums_of_tokens(self, recipe: Callable[..., Recipe]) -> None:
        algorithm = recipe("actor_rollout_ref.actor.loss_agg_mode=token-sum").algorithm
        assert (algorithm.aggregation, algorithm.aggregation_divisor) == ("token_sum", 1.0)
        options = ["loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor=2048"]
        algorithm = recipe(*(f"actor_rollout_ref.actor.{option}" for option in options)).algorithm
        assert (algorithm.aggregation, algorithm.aggregation_divisor) == ("seq_mean_token_sum_norm", 2048.0)

    def test_gdpo(self, recipe: Callable[..., Recipe]) -> None:
        options = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys='[accuracy, format]'"]
        assert recipe(*options).algorithm.reward_parts == {"accuracy": 1.0, "format": 1.0}
        weighted = recipe(*options, "+algorithm.gdpo_reward_weights='[1, 0.5]'").algorithm
        assert weighted.reward_parts == {"accuracy": 1.0, "format": 0.5}

    def test_a_lower_clip_bound_below_0_is_none(self, recipe: Callable[..., Recipe]) -> None:
        assert recipe("actor_rollout_ref.actor.clip_ratio_low=10").algorithm.clip_low == 1.0
