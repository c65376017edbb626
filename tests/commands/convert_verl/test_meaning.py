"""Options of verl that several settings of a recipe express, and the table of options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from docs.generate.from_verl import PAGE, document
from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.hydra.overrides import value_of
from megarl.commands.convert_verl.option import Option
from megarl.commands.convert_verl.sft import SFT
from megarl.commands.convert_verl.table import RL, TRAINER
from megarl.errors import InputError
from megarl.preflight.recipe.data import COLUMNS
from megarl.recipe.schema import Recipe
from megarl.recipe.text import settings_of
from tests.commands.convert_verl.test_convert import GRPO, settings


class TestMeaning:
    def test_gae_has_verls_lambda_and_the_actors_mini_batches(self) -> None:
        text = GRPO.replace("grpo", "gae") + " actor_rollout_ref.actor.ppo_mini_batch_size=512 critic.optim.lr=2e-5"
        converted = settings(text)
        assert (
            converted["algorithm.lam"] == 1.0
            and converted["critic.mini_batches"] == 2
            and converted["critic.optimizer.lr"] == 2e-5
        )
        assert converted["critic.trainers"] == 8

    def test_settings_of_an_unused_critic_are_omitted_with_a_note(self) -> None:
        done = convert(f"{GRPO} critic.optim.lr=2e-5")
        assert "critic.optim.lr=2e-05: not used: the run has no critic" in "\n".join(done.notes)

    def test_a_mini_batch_larger_than_the_batch(self) -> None:
        done = convert(f"{GRPO} data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=64")
        assert "a step has 16 prompts, all in one mini batch" in "\n".join(done.notes)

    def test_samples_of_a_micro_batch_become_tokens(self) -> None:
        """20 samples of up to 512 + 128 tokens."""
        converted = settings(
            f"{GRPO} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 data.max_response_length=128"
        )
        assert converted["actor.max_tokens_per_micro_batch"] == 12800

    def test_a_script_without_a_micro_batch_has_a_note(self) -> None:
        """verl refuses it; its default of tokens may not fit the device."""
        unset = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (verl's default): not set"
        for extra, noted in (("", True), ("use_dynamic_bsz=True", False), ("ppo_micro_batch_size_per_gpu=2", False)):
            option = f" actor_rollout_ref.actor.{extra}" if extra else ""
            assert (unset in "\n".join(convert(f"{GRPO}{option}").notes)) is noted, extra

    def test_sequence_parallel_multiplies_the_tokens_per_micro_batch(self) -> None:
        extra = "use_dynamic_bsz=True ppo_max_token_len_per_gpu=5632 ulysses_sequence_parallel_size=4"
        converted = settings(GRPO + "".join(f" actor_rollout_ref.actor.{option}" for option in extra.split()))
        assert converted["actor.max_tokens_per_micro_batch"] == 22528 and converted["megatron.tensor_parallel"] == 4

    def test_kl_in_the_reward(self) -> None:
        converted = settings(
            f"{GRPO} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_penalty=kl"
        )
        assert (
            converted["algorithm.kl_in_reward"]
            and converted["algorithm.kl_coef"] == 0.02
            and converted["algorithm.kl_estimator"] == "kl"
        )

    def test_one_step_off_becomes_disaggregated_placement(self) -> None:
        text = GRPO.replace("verl.trainer", "verl.experimental.one_step_off_policy")
        converted = settings(f"{text} trainer.n_gpus_per_node=8 rollout.n_gpus_per_node=4 rollout.nnodes=1")
        assert converted["cluster.placement"] == "disaggregated" and converted["rollout.max_staleness"] == 1
        assert converted["cluster.trainers"] == 8 and converted["rollout.engines"] == 2
        assert converted["rollout.at_update"] == "drain", "a batch of verl has samples of one version"

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (
                "data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "is not a multiple of the mini batch size 4",
            ),
            (
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
                "8 devices are not a multiple of rollout.tensor_model_parallel_size=3",
            ),
            ("actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "both True"),
            (
                "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=full",
                "full has no counterpart",
            ),
            ("~data.train_files", "deletes an option"),
            ("data.x='${data.y}'", "refers to other options"),
            ("words", "is not an override of the form key=value"),
            ("actor_rollout_ref.rollout.n=", "line 1: actor_rollout_ref.rollout.n= has no value"),
            ("data.train_batch_size=", "data.train_batch_size= has no value"),
        ],
    )
    def test_unsupported_options_are_refused(self, extra: str, message: str) -> None:
        with pytest.raises(InputError, match=re.escape(message)):
            convert(f"{GRPO} {extra}")

    def test_fields_of_ddp_are_carried_over_for_actor_and_critic(self) -> None:
        """DDP fields that megarl sets itself are left out, with a note."""
        text = f"{GRPO} algorithm.adv_estimator=gae"
        for role in ("actor_rollout_ref.actor", "critic"):
            text += f" +{role}.megatron.override_ddp_config.overlap_grad_reduce=True"
            text += f" +{role}.megatron.override_ddp_config.grad_reduce_in_fp32=True"
        converted = settings(text)
        assert (
            converted["megatron.ddp.overlap_grad_reduce"]
            is converted["critic.megatron.ddp.overlap_grad_reduce"]
            is True
        )
        assert not [key for key in converted if key.endswith("grad_reduce_in_fp32")]
        assert "critic.megatron.ddp.grad_reduce_in_fp32=True: omitted" in convert(text).text

    def test_every_key_of_the_table_is_a_key_of_recipes(self) -> None:
        """A renamed key of a recipe must be renamed in the table."""
        keys = settings_of(Recipe()).keys()

        def exists(key: str) -> bool:
            fields = (
                "megatron.extra.",
                "megatron.ddp.",
                "critic.megatron.ddp.",
                "critic.megatron.extra.",
                "rollout.engine_args.",
                "teacher.engine_args.",
                "reward.arguments.",
                "data.chat_template_args.",
            )
            if key.startswith("data.columns."):
                return key.removeprefix("data.columns.") in {*COLUMNS["rollout"], *COLUMNS["sft"]}
            return key in keys or key.startswith(fields)

        options: list[Option] = [*RL, *SFT, *TRAINER]
        assert not [key for option in options if option.to for key in option.to.split(", ") if not exists(key)]

    def test_page_is_up_to_date(self) -> None:
        assert PAGE.read_text() == document(), "run python -m docs.generate.from_verl"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("0.", 0.0),
        ("-1", -1),
        ("True", True),
        ("null", None),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("[[6],[8]]", [[6], [8]]),
        ("a/b.parquet", "a/b.parquet"),
    ],
)
def test_values(text: str, value: Any) -> None:
    """YAML reads 1e-6 as a string."""
    assert value_of(text, 1) == value and type(value_of(text, 1)) is type(value)
