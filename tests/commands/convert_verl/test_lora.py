"""Adapters: each of verl's engines reads its own options."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError

MODEL = "actor_rollout_ref.model."
RUN = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {MODEL}path=m data.train_files=a.parquet \
actor_rollout_ref.rollout.n=2 """
NESTED, FLAT = f"{MODEL}lora.rank=16 {MODEL}lora.alpha=8", f"{MODEL}lora_rank=4 {MODEL}lora_alpha=2"


def recipe(options: str, *accepted: str) -> dict[str, Any]:
    return yaml.safe_load(convert(RUN + options, accepted=accepted).text)


@pytest.mark.parametrize(
    ("engine", "rank", "alpha", "ignored"), [("megatron", 16, 8, "lora_rank"), ("fsdp", 4, 2, "lora.rank")]
)
def test_an_engine_reads_its_own_options(engine: str, rank: int, alpha: int, ignored: str) -> None:
    converted = convert(f"{RUN} actor_rollout_ref.actor.strategy={engine} {NESTED} {FLAT}")
    assert yaml.safe_load(converted.text)["lora"] == {"rank": rank, "alpha": alpha}  # all-linear is the default
    assert any(f"{ignored}=" in note and "not used" in note for note in converted.notes)


def test_full_training_has_no_adapters() -> None:
    assert "lora" not in recipe("actor_rollout_ref.actor.strategy=megatron")
    assert "lora" not in recipe(f"actor_rollout_ref.actor.strategy=megatron {FLAT}")


def test_alpha_has_the_engines_default() -> None:
    assert recipe(f"{MODEL}lora_rank=4")["lora"] == {"rank": 4, "alpha": 16}
    assert recipe(f"model_engine=megatron {MODEL}lora.rank=4")["lora"] == {"rank": 4}  # 32, as megarl's


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("[linear_qkv,linear_fc2]", ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ("[linear_fc1,linear_fc1_up,linear_proj]", ["gate_proj", "up_proj", "o_proj"]),
        ("[linear_kv_down_proj,linear_q_up_proj]", ["kv_a_proj_with_mqa", "q_b_proj"]),
    ],
)
def test_megatrons_layers_by_their_names_in_the_model(targets: str, layers: list[str]) -> None:
    options = f"model_engine=megatron {NESTED} {MODEL}lora.target_modules={targets}"
    assert recipe(options)["lora"]["targets"] == layers


def test_a_run_with_fsdp_may_start_from_an_adapter() -> None:
    assert recipe(f"{FLAT} {MODEL}lora_adapter_path=adapter")["lora"]["path"] == "adapter"
    assert "lora" not in recipe(f"{MODEL}exclude_modules=.*head"), "no adapters at all"
    with pytest.raises(InputError, match=r"without lora_rank, verl of January 2026 trains these adapters"):
        recipe(f"{MODEL}lora_adapter_path=adapter")


def test_a_critic_with_adapters_is_refused_if_there_is_one() -> None:
    assert "critic" not in recipe("critic.model.lora.rank=8")
    with pytest.raises(InputError, match=r"--accept critic\.model\.lora\.rank"):
        recipe("algorithm.adv_estimator=gae critic.model.lora.rank=8")


def test_merged_adapters() -> None:
    assert recipe(f"model_engine=megatron {NESTED} {MODEL}lora.merge=True")["weight_sync"] == {"adapters": "merged"}


@pytest.mark.parametrize(
    "option",
    [
        f"{MODEL}lora.dropout=0.1",
        f"{MODEL}lora.type=dora",
        f"{MODEL}lora.adapter_path=adapter",
        f"{MODEL}lora.exclude_modules=[lm_head]",
        f"{MODEL}lora.target_modules=[router,linear_proj]",
        f"{MODEL}exclude_modules=.*head",
    ],
)
def test_what_adapters_lack_is_refused(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InputError, match=f"--accept {name}"):
        recipe(f"model_engine=megatron {NESTED} {option}")
    assert recipe(f"model_engine=megatron {NESTED} {option}", name)["lora"]["rank"] == 16
