"""Trainers other than main_ppo: sampling, losses and defaults, and refused options.

Sources: verl of August 2026, verl/trainer/config/ppo_trainer.yaml (trainer.v1); verl-recipe, the folders that the names say.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError
from tests.commands.convert_verl.test_whole_scripts import ACTOR, ASYNC, DATA, PPO, value

R = "actor_rollout_ref.rollout"
V1 = "trainer.v1"
COLOCATE = f"{PPO} {V1}.trainer_mode=colocate_async"
SEPARATE = (
    f"{PPO} {V1}.trainer_mode=separate_async {V1}.separate_async.parameter_sync_step=2 data.train_batch_size=64 "
    f"{ACTOR}.ppo_mini_batch_size=32 {R}.nnodes=1 {R}.n_gpus_per_node=4 trainer.n_gpus_per_node=8"
)
FLOW = f"python3 -m recipe.async_flow.grpo_main {DATA} data.train_batch_size=32 {ACTOR}.ppo_mini_batch_size=8"
GKD = f"python3 -m recipe.gkd.megatron.main_gkd {DATA} teacher.server_ip=10.0.0.1 teacher.server_port=15555"
GVPO = f"python3 -m recipe.gvpo.gvpo_main_ppo {DATA} {R}.n=8 {ACTOR}.policy_loss.loss_mode=gvpo {ACTOR}.ppo_micro_batch_size_per_gpu=16"
SPPO = f"python3 -m recipe.sppo.main_sppo {DATA} {R}.n=4"

# name -> command, and the settings that the recipe must have
CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "v1, synchronous": (f"{PPO} trainer.use_v1=True {V1}.trainer_mode=sync", {"rollout.max_staleness": None, "cluster.placement": None}),
    "v1, ahead on the same devices": (
        COLOCATE,
        {"rollout.max_staleness": 1, "rollout.at_update": "refresh", "cluster.placement": None},
    ),
    "v1, two batches ahead": (f"{COLOCATE} {V1}.colocate_async.num_warmup_batches=2", {"rollout.max_staleness": 2}),
    "v1, ahead by none": (
        f"{COLOCATE} {V1}.colocate_async.num_warmup_batches=0",
        {"rollout.max_staleness": None, "rollout.at_update": "drain"},
    ),
    "v1, engines elsewhere": (
        f"{SEPARATE} {ACTOR}.optim.lr_warmup_steps=3",
        {
            "cluster.placement": "disaggregated", "cluster.trainers": 8, "rollout.engines": 2,  # of 2 devices
            "data.prompts_per_step": 64, "actor.mini_batches": 2, "rollout.max_staleness": 1,
            "actor.optimizer.warmup_steps": 3,  # verl's schedule advances at each of its updates
        },
    ),
    "float16": (
        f"{PPO} {ACTOR}.megatron.dtype=float16 {R}.dtype=float16", {"model.dtype": "float16", "rollout.dtype": "float16"}
    ),
    "float16, with engines in verl's default": (
        f"{PPO} {ACTOR}.fsdp_config.dtype=float16", {"model.dtype": "float16", "rollout.dtype": "bfloat16"}
    ),
    "SPO's trainer without SPO": (
        f"python3 -m recipe.spo.spo_main_ppo {DATA} trainer.spo.enable=False {R}.multi_turn.tool_config_path=tools.yaml",
        {
            "agent.loop": "recipe/spo/config/spo_agent.yaml",
            "agent.loop_arguments": {f"{R}.multi_turn.tool_config_path": "tools.yaml", "sampling_params.stop": "</code>"},
        },
    ),
    "an evaluation of rep_exp": (
        f"python3 -m rep_exp.main_rep_exp {DATA} data.val_files=b.parquet trainer.val_only=True {R}.val_kwargs.n=256",
        {"data.train_files": None, "evaluation.samples": 256, "evaluation.temperature": None, "reward.function": None},
    ),
    "partial rollout": (
        f"{PPO.replace('verl.trainer.main_ppo', 'recipe.partial_rollout.main_ppo')} async_training.partial_rollout=True",
        {"rollout.max_staleness": 1, "rollout.at_update": "refresh", "cluster.placement": None},
    ),
    "async_flow": (
        f"{FLOW} async_flow.staleness=2 async_resources.actor_train.n_gpus_per_node=8 trainer.n_gpus_per_node=6 {ACTOR}.ppo_epochs=3",
        {
            "cluster.placement": "disaggregated", "cluster.trainers": 8, "rollout.engines": 6, "rollout.max_staleness": 2,
            "rollout.at_update": "refresh", "actor.mini_batches": 4, "actor.epochs": None,
            "evaluation.every": None, "algorithm.loss": None,
        },
    ),
    "async_flow that waits": (f"{FLOW} async_flow.wait_for_inflight_requests=True", {"rollout.at_update": "drain"}),
    "gkd, one step ahead": (
        f"{GKD} rollout.n_gpus_per_node=2 data.max_prompt_length=100 data.max_response_length=300 {ACTOR}.micro_batch_size=4",
        {
            "algorithm.loss": "gkd", "algorithm.advantage": "none", "algorithm.reference": "teacher",
            "algorithm.distill_top_k": 256, "algorithm.distill_rest": False, "reward.function": "unscored",
            "teacher.path": "???", "rollout.max_staleness": 1, "rollout.engines": 2, "cluster.trainers": 4,
            "data.columns.prompt": "question", "actor.max_tokens_per_micro_batch": 1600, "evaluation.at_start": None,
        },
    ),
    "gkd, two steps ahead": (f"{GKD} trainer.scheduler=two_step_off", {"rollout.max_staleness": 2}),
    "gkd in tokens": (
        f"{GKD} {ACTOR}.use_dynamic_bsz=True {ACTOR}.max_token_len=2048",
        {"actor.max_tokens_per_micro_batch": 2048},
    ),
    "gvpo": (
        f"{GVPO} {ACTOR}.grad_clip=0.5 {ACTOR}.gvpo_beta=0.2",
        {
            "algorithm.loss": "gvpo", "algorithm.gvpo_beta": 0.2, "algorithm.advantage": None,
            "actor.optimizer.clip_grad": 0.25,  # verl's gradient is 16 / 8 times as large
        },
    ),
    "sppo": (
        SPPO,
        {
            "algorithm.loss": "sppo", "algorithm.advantage": "soft_mean", "algorithm.sppo_eta": None,  # 1, as megarl's
            "rollout.engine": "sglang", "evaluation.samples": None, "actor.optimizer.warmup_steps": 60,  # 15 x 4 mini batches
        },
    ),
    "sppo with another eta": (
        f"{SPPO} algorithm.sppo_eta=0.5 {ACTOR}.sppo_eta=0.5 {R}.name=vllm", {"algorithm.sppo_eta": 0.5, "rollout.engine": None},
    ),
    "dynamo": (PPO.replace("main_ppo", "main_dynamo"), {"rollout.engine": None, "rollout.samples_per_prompt": 4}),
    "a queue of rewards": (
        ASYNC.replace("verl.experimental.fully_async_policy.fully_async_main", "recipe.reward_queue.main").replace("data.train_batch_size=0 ", "").replace("mini_batch_size=8", "mini_batch_size=16"),
        {"cluster.placement": "disaggregated", "data.prompts_per_step": 64},  # an update of 16 four times
    ),
    "actor and critic on halves of the devices": (
        f"python3 -m verl.trainer.main_ppo_split {DATA} critic.model.path=/models/c",
        {"algorithm.advantage": "gae", "critic.model_path": "/models/c"},
    ),
    "losses of the router": (
        f"{PPO} model_engine=megatron {ACTOR}.megatron.override_transformer_config.moe_z_loss_coeff=0.01 "
        f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff=0.001",
        {"megatron.moe_z_loss_coef": 0.01, "megatron.moe_aux_loss_coef": 0.001},
    ),
    "a router without balancing": (
        f"{PPO} model_engine=megatron {ACTOR}.megatron.override_transformer_config.moe_router_load_balancing_type=none "
        f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff=0.001",
        {"megatron.moe_aux_loss_coef": None},
    ),
    "sizes of Megatron Lite": (
        f"{PPO} actor@{ACTOR}=mlite_actor {ACTOR}.engine.tp=2 {ACTOR}.engine.ep=4 {ACTOR}.engine.etp=1 {ACTOR}.engine.param_offload=True",
        {
            "megatron.tensor_parallel": 2, "megatron.expert_parallel": 4, "megatron.recompute": None, "megatron.offload": True,
        },
    ),
    "responses of a fixed length": (f"{PPO} {R}.ignore_eos=True", {"rollout.ignore_eos": True}),
    "rows of the evaluation": (
        f"{PPO} data.val_files=b.parquet data.val_max_samples=100 trainer.test_freq=5",
        {"evaluation.limit": 100},
    ),
    "a warm-up that starts above 0": (
        f"{PPO} {ACTOR}.optim.lr=1e-5 {ACTOR}.optim.lr_warmup_init=1e-6 {ACTOR}.optim.lr_warmup_steps=10",
        {"actor.optimizer.init_lr_ratio": 0.1},
    ),
    "an option of the trainer that verl lacks": (f"{PPO} trainer.some_new_switch=1", {"rollout.samples_per_prompt": 4}),
    "options of a dataset class": (
        f"{PPO} data.custom_cls.path=mine.py data.custom_cls.name=Rows data.my_option=1",
        {"data.train_files": ["data/Rows/train.parquet"]},
    ),
}  # fmt: skip

# name -> command, and what the error says
REFUSED = {
    "an unknown mode": (f"{PPO} {V1}.trainer_mode=fast", "is none of sync, colocate_async, separate_async"),
    "another batch size than the updates'": (
        f"{SEPARATE} data.train_batch_size=96",
        "data.train_batch_size=96 is not trainer.v1.separate_async.parameter_sync_step=2 x ppo_mini_batch_size=32",
    ),
    "another part of v1": (f"{COLOCATE} {V1}.new_section.size=1", f"--accept {V1}.new_section.size"),
    "no partial rollout": (
        f"{PPO.replace('verl.trainer.main_ppo', 'recipe.partial_rollout.main_ppo')} async_training.partial_rollout=False",
        "--accept async_training.partial_rollout",
    ),
    "an unknown scheduler of gkd": (f"{GKD} trainer.scheduler=sync", "neither one_step_off nor two_step_off"),
    "another loss of gkd": (f"{GKD} {ACTOR}.distill_loss.name=rkl", f"--accept {ACTOR}.distill_loss.name"),
    "a temperature of gkd": (f"{GKD} {R}.temperature=0.7", "verl distills the distribution at temperature 1"),
    "gvpo with an entropy bonus": (f"{GVPO} {ACTOR}.entropy_coeff=0.01", f"--accept {ACTOR}.entropy_coeff"),
    "sppo with a KL": (f"{SPPO} {ACTOR}.use_kl_loss=True", "weighs this term by tokens"),
    "sppo with two etas": (f"{SPPO} algorithm.sppo_eta=0.5", "differ; megarl has one"),
    "a limit of tokens per expert": (
        f"{PPO} model_engine=megatron {ACTOR}.megatron.override_transformer_config.moe_expert_capacity_factor=1.0",
        "it drops tokens depending on the rest of their micro batch",
    ),
    "quantized training": (f"{PPO} {ACTOR}.fsdp_config.qat.enable=True", "--accept actor_rollout_ref.actor.fsdp_config.qat.enable"),
    "a type of 8 bits": (f"{PPO} {ACTOR}.megatron.dtype=float8", "this value has no counterpart; supported: bfloat16, bf16, float16"),
    "SPO": (f"python3 -m recipe.spo.spo_main_ppo {DATA} trainer.spo.enable=True", "megarl has no SPO: no values of prompts"),
    "an exploration bonus": (
        f"python3 -m rep_exp.main_rep_exp {DATA} reward_model.enable=True reward_model.model.path=m",
        "this model's hidden states give the exploration bonus of rep_exp",
    ),
    "function tools of a loop": (
        f"{PPO} {R}.agent.agent_loop_config_path=loops.yaml {R}.multi_turn.function_tool_path=tools.py",
        "verl's function tools are not passed to agent loops",
    ),
    "another syntax of calls": (
        f"{PPO} {R}.multi_turn.enable=True {R}.multi_turn.tool_config_path=tools.yaml {R}.multi_turn.format=qwen3_coder",
        "megarl does not read this syntax of calls",
    ),
    "an evaluation without rows": (f"{PPO} trainer.val_only=True data.val_files=null", "--accept trainer.val_only"),
    "an evaluation of a checkpoint": (
        f"{PPO} trainer.val_only=True data.val_files=b.parquet trainer.resume_mode=resume_path", "--accept trainer.resume_mode"
    ),
    "some of the rows": (f"{PPO} data.train_max_samples=100", "every row is used"),
    "an option that verl lacks": (f"{PPO} {R}.new_option=1", f"--accept {R}.new_option"),
    "virtual stages of Megatron Lite": (f"{PPO} actor@{ACTOR}=mlite_actor {ACTOR}.engine.vpp=2", "use megatron.virtual_pipeline"),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_a_trainer_is_carried_over(name: str) -> None:
    command, expected = CARRIED[name]
    content = yaml.safe_load(convert(command).text)
    assert {key: value(content, key) for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_difference_is_refused(name: str) -> None:
    command, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        convert(command)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (COLOCATE, "verl trains on groups in the order of their arrival"),
        (GKD, "the loss is the mean over the tokens of a step"),
        (GVPO, "AdamW's update does not depend on this factor"),
        (f"{PPO} data.min_response_length=5", "verl does not read it"),
        (f"{PPO} trainer.some_new_switch=1", "unknown option, omitted"),
        (f"{PPO} data.custom_cls.path=a.py data.custom_cls.name=Rows data.my_option=1", "the dataset class reads it"),
    ],
)
def test_a_remaining_difference_has_a_note(command: str, words: str) -> None:
    assert any(words in note for note in convert(command).notes)
