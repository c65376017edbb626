"""Options that once became a recipe with another meaning without an error."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError

GRPO = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_files=a.parquet "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 trainer.total_training_steps=3"
)
OVERLONG = (
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True reward_model.reward_kwargs.overlong_buffer_cfg.len=64"
)
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def recipe(options: str, *arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(convert(f"{GRPO} {options}", arguments).text)
    return content


@pytest.mark.parametrize("value", ["1", "True", "true"])
def test_a_switch_is_on(value: str) -> None:
    assert recipe(f"{A}.use_kl_loss={value}")["algorithm"]["kl_coef"] == 0.001


@pytest.mark.parametrize("value", ["yes", "on", "2", "'\"True\"'", "0.5"])
@pytest.mark.parametrize(
    "option", [f"{A}.use_kl_loss", "algorithm.filter_groups.enable", "data.filter_overlong_prompts"]
)
def test_a_switch_that_is_neither_on_nor_off_is_refused(option: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"{option}=.* is not True or False"):
        recipe(f"{option}={value}")


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("trainer.total_training_step", "trainer.total_training_steps"),
        ("trainer.testfreq", "trainer.test_freq"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
    ],
)
def test_a_mistyped_option_of_the_trainer_is_refused(option: str, nearest: str) -> None:
    with pytest.raises(InputError, match=rf"{option}=5: unknown option; nearest: {nearest}"):
        recipe(f"{option}=5")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("+actor_rollout_ref.ref.model.path=other", "the reference policy is the actor before the run"),
        (f"{M}.override_config.num_hidden_layers=2", "write it into the config.json of model.path"),
        (f"{M}.override_config.attention_dropout=0.1", "the model's config.json determines it"),
        (f"{A}.optim.override_optimizer_config.adam_beta2=0.9", "set actor.optimizer"),
        (f"{A}.optim.override_optimizer_config.decoupled_weight_decay=False", "AdamW, with decoupled weight decay"),
        (f"{R}.response_length=1024", "data.max_response_length is 512"),
        (f"{R}.prompt_length=1024", "data.max_prompt_length is 512"),
        (f"{R}.max_model_len=1000", "verl cuts responses there, before .* = 1024"),
        ("trainer.resume_mode=resume_path", "give model.path, the exported weights"),
        (
            f"reward_model.reward_kwargs.max_resp_len=256 {OVERLONG}",
            "the buffer ends at data.max_response_length, which is 512",
        ),
    ],
)
def test_an_option_that_changes_the_run_is_refused(option: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        recipe(option)
    name = option.lstrip("+").partition("=")[0]
    assert convert(f"{GRPO} {option}", accepted=[name]).text


@pytest.mark.parametrize(
    "option",
    [
        f"{M}.override_config.attention_dropout=0.",
        f"{M}.override_config.model_config.max_position_embeddings=32768",
        f"{M}.override_config='{{attn_implementation: eager}}'",
        f"{A}.optim.override_optimizer_config.optimizer_offload_fraction=1",
        f"{R}.response_length=512",
        f"{R}.max_model_len=1024",
        "trainer.resume_from_path=checkpoints/ trainer.resume_mode=disable",
        f"reward_model.reward_kwargs.max_resp_len=512 {OVERLONG}",
        "reward_model.reward_kwargs.max_resp_len=256",
    ],
)
def test_an_option_that_changes_nothing_is_not_refused(option: str) -> None:
    assert recipe(option)["model"]["path"] == "m"


def test_mappings_are_read_as_hydra_reads_them() -> None:
    """YAML reads {a:1} as the key 'a:1' without a value."""
    kwargs = "custom_reward_function.path=r.py custom_reward_function.reward_kwargs='{weight:1e-2,url:http://h:1,parts:{a:[1,b]}}'"
    options = (
        f"{kwargs} data.apply_chat_template_kwargs='{{enable_thinking:False}}' {A}.policy_loss='{{loss_mode:gspo}}'"
    )
    content = recipe(options)
    assert content["reward"]["arguments"] == {"weight": 0.01, "url": "http://h:1", "parts": {"a": [1, "b"]}}
    assert content["data"]["chat_template_args"] == {"enable_thinking": False}
    assert content["algorithm"]["loss"] == "gspo"


def test_a_chat_template_of_the_command_is_the_recipes() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert recipe(f"{M}.custom_chat_template='{template}'")["data"]["chat_template"] == template


def test_tools_are_for_every_row() -> None:
    notes = convert(f"{GRPO} {R}.multi_turn.tool_config_path=tools.yaml").notes
    assert any("every row has the tools, in verl rows with agent_name=tool_agent" in note for note in notes)


def test_notes_of_options_without_effect_come_last() -> None:
    """A reader sees the differences first, in the recipe and on the terminal."""
    result = convert(f"{GRPO} trainer.balance_batch=False {R}.val_kwargs.top_k=20 data.truncation=left", rows=2048)
    first, _, last = result.text.partition("#   without effect on what the run computes:")
    assert "trainer.balance_batch=False" in last and "trainer.balance_batch" not in first
    assert "val_kwargs.top_k=20" in first and "data.truncation=left" in first
    assert [note for note in result.notes if note in result.minor] == result.notes[-len(result.minor) :]


def test_an_accepted_option_is_a_difference() -> None:
    result = convert(f"{GRPO} {R}.max_model_len=1000", accepted=[f"{R}.max_model_len"])
    assert [note for note in result.notes if "verl cuts responses there" in note and note not in result.minor]


def test_a_default_that_verl_has_changed_has_a_note() -> None:
    """A script of an earlier verl relies on the earlier default."""
    command = GRPO.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
    command += f" data.train_batch_size=0 data.gen_batch_size=1 {A}.ppo_mini_batch_size=8 {R}.n=2 rollout.total_rollout_steps=4096"
    option = "algorithm.rollout_correction.bypass_mode"
    assert any(
        note.startswith(f"{option} (verl's default)") and "January 2026" in note for note in convert(command).notes
    )
    assert not any("January 2026" in note for note in convert(f"{command} {option}=True").notes)


VLLM = f"+{R}.engine_kwargs.vllm"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (
            f"{VLLM}.additional_config.enable_flashcomm1=True {VLLM}.additional_config.ascend_scheduler_config.enabled=True",
            {"additional_config": {"enable_flashcomm1": True, "ascend_scheduler_config": {"enabled": True}}},
        ),
        (f"{VLLM}.additional_config='{{enable_flashcomm1:True}}'", {"additional_config": {"enable_flashcomm1": True}}),
        (
            f"{VLLM}.speculative_config.method=mtp {VLLM}.speculative_config.num_speculative_tokens=1",
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        ),
        (f"{VLLM}.hf_overrides.rope_theta=1000", {"hf_overrides": {"rope_theta": 1000}}),
    ],
)
def test_engine_arguments_that_are_mappings_are_kept(options: str, arguments: dict[str, Any]) -> None:
    assert arguments.items() <= recipe(options)["rollout"]["engine_args"].items()


def test_of_a_mapping_only_the_rejected_keys_are_omitted() -> None:
    options = f"{VLLM}.additional_config.enable_flashcomm1=True {VLLM}.additional_config.nonsense.depth=1"
    assert recipe(options)["rollout"]["engine_args"]["additional_config"] == {"enable_flashcomm1": True}
    notes = [note for note in convert(f"{GRPO} {options}").notes if "additional_config" in note]
    assert len(notes) == 1 and ".nonsense.depth=1: omitted, " in notes[0] and "no version of vllm-ascend" in notes[0]


def test_a_mapping_without_its_rejected_key_is_omitted_if_it_needs_the_key() -> None:
    options = f"{VLLM}.speculative_config.method=eagle3 {VLLM}.speculative_config.num_speculative_tokens=1"
    assert "speculative_config" not in recipe(options)["rollout"]["engine_args"]
    notes = "\n".join(convert(f"{GRPO} {options}").notes)
    assert ".method=eagle3: omitted, " in notes and ".num_speculative_tokens=1: omitted, " in notes


def test_engines_with_pipeline_stages_are_not_converted() -> None:
    """An engine has `tensor_parallel` devices."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        assert recipe(f"{VLLM}.{name}=1")["rollout"]["engine_args"][name] == 1
        assert name not in recipe(f"{VLLM}.{name}=2")["rollout"]["engine_args"]
        notes = convert(f"{GRPO} {VLLM}.{name}=2").notes
        assert any(f"{name}=2: omitted, " in note and "set rollout.tensor_parallel instead" in note for note in notes)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (f"{R}.max_num_seqs=0", "max_num_seqs=0: omitted, it must be above 0; set it above 0"),
        (f"{R}.gpu_memory_utilization=90", "it must be above 0, and at most 1"),
        (f"{VLLM}.template='{{{{ a\nb: c }}}}'", "template={{ a b: c }}: omitted"),
    ],
)
def test_a_note_about_a_rejected_engine_argument_is_one_comment(option: str, reason: str) -> None:
    text = convert(f"{GRPO} {option}").text
    assert yaml.safe_load(text)["model"] == {"path": "m"}
    assert any(line.startswith("#   rollout.engine_args.") and reason in line for line in text.splitlines())


def test_the_users_own_engine_arguments_are_kept() -> None:
    """The preflight of a run reports them."""
    script, own = f"{VLLM}.speculative_config.num_speculative_tokens=1", "rollout.engine_args.speculative_config.method"
    arguments = recipe(script, f"{own}=eagle3")["rollout"]["engine_args"]
    assert arguments["speculative_config"] == {"num_speculative_tokens": 1, "method": "eagle3"}
    assert recipe(f"{R}.max_num_seqs=8", "rollout.engine=vlm")["rollout"]["engine_args"]["max_num_seqs"] == 8
