"""Table of verl's options and the corresponding settings of megarl. `Conversion.apply` applies it.

`RL` has the options of verl.trainer.main_ppo and of the entry points of DAPO and one-step-off; `rewards.py` has its rewards, `sampling.py`,
`fully_async.py` and `gkd.py` have further options of other trainers, and `sft.py` the options of supervised training. `TRAINER` belongs to RL
and SFT. ``*`` in the name of an option matches any text.
"""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.option import Option, no_counterpart
from megarl.commands.convert_verl.rewards import OF_REWARD
from megarl.commands.convert_verl.sampling import OF_SAMPLING

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ACTOR = _A
LOSS_MODE = f"{_A}.policy_loss.loss_mode"
OF_POLICY_LOSS = ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")

_SAME_ADVANTAGES = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "grpo_passk", "gpg",
)  # fmt: skip
ADVANTAGES = {
    **{name: name for name in _SAME_ADVANTAGES},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "gdpo": "gdpo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
LOSSES = {
    "vanilla": "ppo_clip", "gspo": "gspo", "sapo": "sapo", "gpg": "reinforce", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro", "gvpo": "gvpo",
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum", "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm", "token-sum": "token_sum",
}  # fmt: skip
KL_ESTIMATORS = {
    "low_var_kl": "low_var_kl", "k3": "low_var_kl", "kl": "kl", "k1": "kl", "mse": "mse", "k2": "mse", "abs": "abs",
}  # fmt: skip
METRICS = {"acc": "accuracy", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}
RESUME = {"disable": "never", "auto": "auto"}

_CONFIG = "the model's config.json determines it"
_CONFIGS = "actor_rollout_ref.model.override_config"
SAME_NAME = "same name in megarl"
ULYSSES = "tensor parallelism of the same size, which also splits sequences"
ALWAYS = "megarl always does this"
_FSDP = "an FSDP option; megarl trains with Megatron"
_TOKENS = "micro batches are measured in tokens; actor.max_tokens_per_micro_batch also applies to the log-prob passes"
_REFERENCE = "the actor's processes compute the reference policy, in the actor's layout"


def layout_options(prefix: str, to: str) -> list[Option]:
    """Return the options of verl's Megatron engine below `prefix`, for the recipe's section `to`."""
    config = f"{prefix}override_transformer_config"
    return [
        Option(f"{prefix}tensor_model_parallel_size", f"{to}.tensor_parallel"),
        Option(f"{prefix}pipeline_model_parallel_size", f"{to}.pipeline_parallel"),
        Option(f"{prefix}virtual_pipeline_model_parallel_size", f"{to}.virtual_pipeline"),
        Option(f"{prefix}context_parallel_size", f"{to}.context_parallel"),
        Option(f"{prefix}expert_model_parallel_size", f"{to}.expert_parallel"),
        Option(f"{prefix}expert_tensor_parallel_size", f"{to}.expert_tensor_parallel", "if unset, and expert parallelism is on: the tensor-parallel size, as in Megatron", derived=True),
        Option(f"{prefix}use_distributed_optimizer", f"{to}.distributed_optimizer"),
        Option(f"{config}.recompute_granularity", f"{to}.recompute", names={"full": "full", "selective": "selective", None: "none"}),
        Option(f"{config}.recompute_*", None, f"{to}.recompute=full recomputes every layer, one at a time"),
        Option(f"{config}.num_layers_in_first_pipeline_stage", f"{to}.first_stage_layers"),
        Option(f"{config}.num_layers_in_last_pipeline_stage", f"{to}.last_stage_layers"),
        Option(f"{config}.pipeline_num_transformer_layers", None, f"use {to}.first_stage_layers and last_stage_layers"),
        *no_counterpart(_CONFIG, *(f"{config}.{name}*" for name in ("multi_head_latent_attention", "rope_scaling", "yarn_", "seq_length"))),
        Option(f"{config}.moe_z_loss_coeff", f"{to}.moe_z_loss_coef"),
        Option(f"{config}.moe_aux_loss_coeff", f"{to}.moe_aux_loss_coef", "unless moe_router_load_balancing_type=none, or vanilla_mbridge=True without a type: verl then has no balancing", derived=True),
        Option(f"{config}.moe_router_load_balancing_type", f"{to}.moe_aux_loss_coef", "see moe_aux_loss_coeff", derived=True),
        *no_counterpart("it drops tokens depending on the rest of their micro batch", *(f"{config}.{name}" for name in ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy")), same=(None, False), changes=True),
        Option(f"{config}.*", f"{to}.extra.*", SAME_NAME),
        Option(f"{prefix}override_ddp_config.*", f"{to}.ddp.*", SAME_NAME),
    ]  # fmt: skip


def lite_options(prefix: str, to: str) -> list[Option]:
    """Return the sizes of verl's Megatron Lite and Automodel engines below `prefix`, for the recipe's section `to`."""
    sizes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor"}
    return [
        *(Option(f"{prefix}{name}", f"{to}.{size}_parallel") for name, size in sizes.items()),
        *(Option(f"{prefix}{name}_size", f"{to}.{size}_parallel") for name, size in sizes.items()),
        *no_counterpart(f"use {to}.virtual_pipeline", f"{prefix}vpp", same=(None, 1), changes=True),
    ]


def optimizer_overrides(prefix: str, remark: str) -> list[Option]:
    """Return the fields of Megatron's optimizer that verl overrides below `prefix`. remark: of fields that concern its place in memory."""
    config = f"{prefix}.override_optimizer_config"
    in_memory = ("optimizer_cpu_offload", "*offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    return [
        *no_counterpart(remark, *(f"{config}.{name}" for name in in_memory)),
        *no_counterpart("AdamW, with decoupled weight decay", f"{config}.decoupled_weight_decay", same=(True,), changes=True),
        *no_counterpart("set actor.optimizer or critic.optimizer", f"{config}*", same=({}, None), changes=True),
    ]  # fmt: skip


RL = [
    Option("actor_rollout_ref.model.path", "model.path"),
    Option("actor_rollout_ref.model.tokenizer_path", "model.tokenizer"),
    Option("data.train_files", "data.train_files"),
    Option("data.val_files", "data.eval_files"),
    Option("data.train_batch_size", "data.prompts_per_step"),
    Option("data.gen_batch_size", "algorithm.dynamic_sampling.max_attempts", "with max_num_gen_batches", derived=True),
    Option("data.max_prompt_length", "data.max_prompt_length"),
    Option("data.max_response_length", "rollout.max_response_length"),
    Option("data.filter_overlong_prompts", "data.overlong_prompts", "True is filter", derived=True),
    Option("data.truncation", "data.overlong_prompts", "error is error; prompts are never truncated: left, right and middle become filter", derived=True),
    Option("data.shuffle", "data.shuffle"),
    Option("data.seed", "train.seed"),
    Option("data.apply_chat_template_kwargs", "data.chat_template_args"),
    Option("data.apply_chat_template_kwargs.*", "data.chat_template_args.*", SAME_NAME),
    Option("data.prompt_key", "data.columns.prompt"),
    Option("data.image_key", "data.columns.images"),
    Option("data.video_key", "data.columns.videos"),
    Option("data.reward_fn_key", "data.columns.data_source"),
    Option("data.custom_cls.path", "data.train_files, data.eval_files", "files that `megarl data verl_dataset` writes with the class: a note has the commands", derived=True),
    Option("data.custom_cls.name", "data.train_files, data.eval_files", "see data.custom_cls.path", derived=True),
    *no_counterpart("rows come in the order of data.shuffle and data.curriculum", "data.sampler.*", same=(None,), changes=True),
    *no_counterpart("rows are fixed before the run", "data.datagen.*", same=(None,), changes=True),
    *no_counterpart("the preparation of rows has no setting", "data.filter_overlong_prompts_workers", "data.dataloader_num_workers", "data.return_raw_chat", "data.return_raw_input_ids", "data.image_patch_size", "actor_rollout_ref.model.use_shm"),
    *no_counterpart("evaluation takes all rows at once, in the order of the file", "data.val_batch_size", "data.validation_shuffle"),
    Option("data.val_max_samples", "evaluation.limit", "-1 is all rows", derived=True),
    *no_counterpart("every row is used", "data.train_max_samples", same=(-1,), changes=True),
    Option("trainer.val_only", "data.train_files", "True: left out, for megarl eval; refused where the trainer does not evaluate first", derived=True),
    Option("algorithm.adv_estimator", "algorithm.advantage", names=ADVANTAGES),
    *no_counterpart("algorithm.advantage determines it", f"{_A}.calculate_sum_pi_squared", f"{_A}.sum_pi_squared_checkpointing"),
    Option("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_by_std"),
    Option("algorithm.gamma", "algorithm.gamma"),
    Option("algorithm.lam", "algorithm.lam"),
    Option("algorithm.use_kl_in_reward", "algorithm.kl_in_reward", derived=True),
    Option("algorithm.kl_penalty", "algorithm.kl_estimator", "if use_kl_in_reward is True", KL_ESTIMATORS, derived=True),
    Option("algorithm.kl_ctrl.*", "algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon", "if use_kl_in_reward is True; otherwise verl ignores it", derived=True),
    Option("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.enabled"),
    Option("algorithm.filter_groups.metric", "algorithm.dynamic_sampling.metric", names=METRICS),
    Option("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.max_attempts", "x data.gen_batch_size / data.train_batch_size: an attempt is a batch of data.prompts_per_step", derived=True),
    Option("algorithm.rollout_correction.rollout_is", "algorithm.correction.weights", names={"token": "token", "sequence": "sequence", None: "none"}),
    Option("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction.truncate, algorithm.correction.reject", "a number truncates; LOW_HIGH rejects tokens outside", derived=True),
    Option("algorithm.rollout_correction.rollout_rs", "algorithm.correction.reject", "token_k1 is token_ratio, seq_mean_k3 mean_k3, ...; bounds of k1 are 1 / verl's: its k1 is log p(engine) / p(trainer)", derived=True),
    Option("algorithm.rollout_correction.rollout_rs_threshold*", "algorithm.correction.reject", "the limits of rollout_rs", derived=True),
    Option("algorithm.rollout_correction.loss_type", "algorithm.loss", "in bypass mode: ppo_clip, or reinforce", derived=True),
    Option("algorithm.rollout_correction.rollout_token_veto_threshold", "algorithm.correction.reject", "the lower limit of worst_ratio", derived=True),
    Option("algorithm.rollout_correction.rollout_is_batch_normalize", "algorithm.correction.normalize"),
    Option("algorithm.rollout_correction.bypass_mode", "algorithm.old_log_probs", names={True: "rollout", False: "computed"}),
    Option(LOSS_MODE, "algorithm.loss", names=LOSSES),
    Option(f"{_A}.policy_loss.clip_cov_ratio", "algorithm.cov_share"),
    Option(f"{_A}.policy_loss.kl_cov_ratio", "algorithm.cov_share"),
    Option(f"{_A}.policy_loss.clip_cov_lb", "algorithm.cov_low"),
    Option(f"{_A}.policy_loss.clip_cov_ub", "algorithm.cov_high"),
    Option(f"{_A}.policy_loss.ppo_kl_coef", "algorithm.cov_kl_coef"),
    Option(f"{_A}.clip_ratio", None, "verl uses clip_ratio_low and clip_ratio_high, which are 0.2 by default"),
    Option(f"{_A}.clip_ratio_low", "algorithm.clip_low"),
    Option(f"{_A}.clip_ratio_high", "algorithm.clip_high"),
    Option(f"{_A}.clip_ratio_c", "algorithm.dual_clip"),
    Option(f"{_A}.tau_pos", "algorithm.tau_positive"),
    Option(f"{_A}.tau_neg", "algorithm.tau_negative"),
    Option(f"{_A}.gvpo_beta", "algorithm.gvpo_beta"),
    *(Option(f"{prefix}.sppo_eta", "algorithm.sppo_eta", "with main_sppo; algorithm's and actor's must be equal", derived=True) for prefix in ("algorithm", _A)),
    Option(f"{_A}.loss_agg_mode", "algorithm.aggregation", names=AGGREGATIONS),
    Option(f"{_A}.loss_scale_factor", "algorithm.aggregation_divisor", "1 with loss_agg_mode=token-sum", derived=True),
    Option(f"{_A}.policy_loss.dro_beta", "algorithm.log_ratio_coef", "half of it", derived=True),
    Option("algorithm.gdpo_reward_*", "algorithm.reward_parts", "the names with their weights", derived=True),
    Option(f"{_A}.entropy_coeff", "algorithm.entropy_coef"),
    Option(f"{_A}.use_kl_loss", "algorithm.kl_coef", "False is 0", derived=True),
    Option(f"{_A}.kl_loss_coef", "algorithm.kl_coef", "if use_kl_loss is True", derived=True),
    Option(f"{_A}.kl_loss_type", "algorithm.kl_estimator", "if use_kl_loss is True", KL_ESTIMATORS, derived=True),
    Option(f"{_A}.ppo_mini_batch_size", "actor.mini_batches", "data.train_batch_size / this value", derived=True),
    Option(f"{_A}.use_dynamic_bsz", "actor.max_tokens_per_micro_batch", "selects one of the next two options", derived=True),
    Option(f"{_A}.ppo_max_token_len_per_gpu", "actor.max_tokens_per_micro_batch", "x ulysses_sequence_parallel_size", derived=True),
    Option(f"{_A}.ppo_micro_batch_size_per_gpu", "actor.max_tokens_per_micro_batch", "x (data.max_prompt_length + rollout.max_response_length)", derived=True),
    Option(f"{_A}.ppo_epochs", "actor.epochs"),
    Option(f"{_A}.optim.lr", "actor.optimizer.lr"),
    Option(f"{_A}.optim.weight_decay", "actor.optimizer.weight_decay"),
    Option(f"{_A}.optim.betas", "actor.optimizer.betas"),
    Option(f"{_A}.optim.clip_grad", "actor.optimizer.clip_grad"),
    Option(f"{_A}.grad_clip", "actor.optimizer.clip_grad"),
    Option(f"{_A}.optim.min_lr_ratio", "actor.optimizer.min_lr_ratio"),
    Option(f"{_A}.optim.lr_warmup_steps", "actor.optimizer.warmup_steps", "x actor.mini_batches: verl's schedule advances once per step", derived=True),
    Option(f"{_A}.optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps", "x the number of optimizer steps", derived=True),
    Option(f"{_A}.optim.warmup_style", "actor.optimizer.decay", names={"constant": "constant", "cosine": "cosine"}),
    Option(f"{_A}.optim.lr_scheduler_type", "actor.optimizer.decay", names={"constant": "constant", "cosine": "cosine"}),
    Option(f"{_A}.optim.lr_decay_style", "actor.optimizer.decay", names={"constant": "constant", "cosine": "cosine", "linear": "linear"}),
    Option(f"{_A}.optim.lr_decay_steps", "actor.optimizer.decay_steps", "x optimizer steps per step; without a decay it has no effect", derived=True),
    Option(f"{_A}.optim.min_lr", "actor.optimizer.min_lr_ratio", "divided by lr; without a decay it has no effect", derived=True),
    *(option for prefix in (f"{_A}.optim", "critic.optim") for option in (
        *no_counterpart("it selects one of verl's implementations", f"{prefix}.optimizer_impl", same=("torch.optim",)),
        *no_counterpart("the length of a run is train.steps", f"{prefix}.total_training_steps"),
        *no_counterpart("a cosine decay has half a period", f"{prefix}.num_cycles", same=(0.5,), changes=True),
        *no_counterpart("weight decay is constant", f"{prefix}.weight_decay_incr_style", same=("constant",), changes=True),
    )),
    *(Option(f"{prefix}.{name}", f"{section}.init_lr_ratio", remark, derived=True) for prefix, section in ((f"{_A}.optim", "actor.optimizer"), ("critic.optim", "critic.optimizer")) for name, remark in (("init_lr_ratio", ""), ("lr_warmup_init", "divided by lr"))),
    *no_counterpart("AdamW is the only optimizer", f"{_A}.optim.optimizer", "critic.optim.optimizer", same=("AdamW", "adamw", "adam"), changes=True),
    *optimizer_overrides(f"{_A}.optim", "optimizer states in host memory: actor.optimizer.extra.optimizer_cpu_offload or megatron.extra.swap_optimizer, depending on the device"),
    *no_counterpart("it selects verl's trainers; megarl trains with Megatron", f"{_A}.strategy", "model_engine", same=("megatron",)),
    *layout_options(f"{_A}.megatron.", "megatron"),
    Option(f"{_A}.megatron.*_offload", "megatron.offload", "true if any is True", derived=True),
    *no_counterpart("mbridge loads Hugging Face weights; a run reads only its checkpoints", "critic.megatron.use_mbridge", "critic.megatron.vanilla_mbridge", "critic.megatron.*dist_checkpointing*", f"{_A}.megatron.use_mbridge", f"{_A}.megatron.vanilla_mbridge", f"{_A}.megatron.use_dist_checkpointing", f"{_A}.megatron.dist_checkpointing_path", f"{_A}.load_weight"),
    Option(f"{_A}.ulysses_sequence_parallel_size", "megatron.tensor_parallel", ULYSSES, derived=True),
    *no_counterpart("megarl has no counterpart", f"{_A}.*.qat.enable", same=(None, False), changes=True),
    *no_counterpart("the trainers' data type is model.dtype: bfloat16 or float32", f"{_A}.megatron.dtype", f"{_A}.fsdp_config.dtype", same=("bfloat16", "bf16", "fp32", "float32"), changes=True),
    Option(f"{_A}.fsdp_config.*_offload", "megatron.offload", "true if any is True", derived=True),
    Option("actor_rollout_ref.model.enable_gradient_checkpointing", "megatron.recompute", names={True: "full", False: "none"}),
    *no_counterpart(_FSDP, f"{_A}.fsdp_config.*", f"{_A}.use_torch_compile", f"{_A}.entropy_checkpointing", f"{_A}.entropy_from_logits_with_chunking", "actor_rollout_ref.model.use_liger", "actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.model.fused_kernel_options.*", "actor_rollout_ref.model.enable_activation_offload"),
    *no_counterpart(ALWAYS, "actor_rollout_ref.model.use_remove_padding", f"{_R}.free_cache_engine", f"{_R}.calculate_log_probs", "trainer.balance_batch", same=(True,)),
    *no_counterpart("it changes nothing that the model computes", f"{_CONFIGS}.*max_position_embeddings", f"{_CONFIGS}.*attn_implementation"),
    *no_counterpart("the model's config.json determines it", f"{_CONFIGS}.*_pdrop", f"{_CONFIGS}.*dropout", same=(0, None), changes=True),
    *no_counterpart("write it into the config.json of model.path", f"{_CONFIGS}*", same=({}, None), changes=True),
    *no_counterpart(_CONFIG, "actor_rollout_ref.model.trust_remote_code", "critic.model.trust_remote_code", "data.trust_remote_code", "actor_rollout_ref.model.torch_dtype"),
    Option("actor_rollout_ref.model.lora_rank", "lora.rank", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.lora_alpha", "lora.alpha", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.target_modules", "lora.targets", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.lora.rank", "lora.rank", "with Megatron", derived=True),
    Option("actor_rollout_ref.model.lora.alpha", "lora.alpha", "with Megatron", derived=True),
    Option("actor_rollout_ref.model.lora.target_modules", "lora.targets", "with Megatron: linear_fc1 is gate_proj and up_proj, ...", derived=True),
    Option("actor_rollout_ref.model.lora.merge", "weight_sync.adapters", "True is merged", derived=True),
    Option("actor_rollout_ref.model.lora.*", "lora.targets", "values that megarl's adapters lack are refused", derived=True),
    Option("actor_rollout_ref.model.lora_adapter_path", "lora.path", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.exclude_modules", "lora.targets", "refused with adapters", derived=True),
    *no_counterpart("all of the critic's weights are trained", "critic.model.lora_rank", "critic.model.lora.rank", same=(0,), changes=True),
    *no_counterpart("all of the critic's weights are trained", "critic.model.lora*"),
    *no_counterpart(_TOKENS, f"{_R}.log_prob_*"),
    *no_counterpart("the reference policy is the actor before the run", "actor_rollout_ref.ref.model.*", "actor_rollout_ref.ref.path", changes=True),
    *no_counterpart(_REFERENCE, "actor_rollout_ref.ref.*"),
    Option(f"{_R}.multi_turn.enable", "agent.tools", "with tool_config_path; otherwise give agent.tools after the file", derived=True),
    Option(f"{_R}.multi_turn.max_assistant_turns", "agent.max_turns"),
    Option(f"{_R}.multi_turn.max_parallel_calls", "agent.max_calls_per_turn"),
    Option(f"{_R}.multi_turn.format", "agent.format", "hermes, gpt-oss; others are refused if the run has tools", derived=True),
    Option(f"{_R}.multi_turn.tool_config_path", "agent.tools, agent.tool_rewards", "the rewards of tools are for scorer alone, as in verl", derived=True),
    Option(f"{_R}.multi_turn.function_tool_path", "agent.tools", "refused: give agent.tools after the file", derived=True),
    Option(f"{_R}.multi_turn.max_user_turns", "agent.max_turns", "one more, if max_assistant_turns is not less", derived=True),
    *no_counterpart("agent.max_answer_tokens limits tokens, not characters", f"{_R}.multi_turn.max_tool_response_length", f"{_R}.multi_turn.tool_response_truncate_side"),
    Option(f"{_R}.multi_turn.interaction_config_path", "agent.interaction, agent.tool_rewards", "the user's scores are for the scorer alone, as in verl", derived=True),
    Option(f"{_R}.multi_turn.*", "agent.loop_arguments", "with agent_loop_config_path; otherwise unknown options are refused", derived=True),
    Option(f"{_R}.agent.agent_loop_config_path", "agent.loop, agent.loop_arguments", "with the options of multi_turn, which loops may read", derived=True),
    Option(f"{_R}.agent.default_agent_loop", "agent.loop_arguments", "the loop of rows without agent_name, if agent_loop_config_path has it", derived=True),
    *no_counterpart("megarl runs the loops itself, and no manager of your own", f"{_R}.agent.agent_loop_manager_class", same=(None,), changes=True),
    *no_counterpart("agent.processes is per engine", f"{_R}.agent.num_workers"),
    Option(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", "weight_sync.bucket_mb"),
    *(Option(name, "megatron.routing_replay", names={"disabled": "none", "R2": "old_log_probs", "R3": "rollout"}) for name in (f"{_A}.*.router_replay.mode", f"{_A}.router_replay.mode")),
    *no_counterpart("megarl has no counterpart", f"{_R}.quantization", "actor_rollout_ref.model.mtp.enable", same=(None, False), changes=True),
    Option(f"{_R}.ignore_eos", "rollout.ignore_eos"),
    Option(f"{_A}.ppo_micro_batch_size", "actor.max_tokens_per_micro_batch", "as ppo_micro_batch_size_per_gpu, of all devices", derived=True),
    *no_counterpart("verl's sapo reads actor.tau_pos and actor.tau_neg", f"{_A}.policy_loss.tau_pos", f"{_A}.policy_loss.tau_neg"),
    *no_counterpart("verl reads the option of the same name in actor.policy_loss", *(f"{_A}.{name}" for name in OF_POLICY_LOSS), changes=True),
    *no_counterpart("the weights are read, and nothing is dropped at random", f"{_A}.megatron.seed", "critic.megatron.seed"),
    *no_counterpart("samples keep their order within a step", f"{_A}.shuffle", same=(False,), changes=True),
    *no_counterpart("it belongs to qat, mtp or router_replay", f"{_A}.*.qat.*", "actor_rollout_ref.model.mtp.*", f"{_R}.enable_rollout_routing_replay"),
    *no_counterpart("see observe.profile", "*.profiler.*", "global_profiler.*"),
    *no_counterpart("Ray is started as the recipe's section cluster says", "ray_kwargs.*"),
    *no_counterpart("a checkpoint has weights, optimizer and positions", f"{_A}.checkpoint.*", "critic.checkpoint.*"),
    *no_counterpart("the rate stays above this share", f"{_A}.optim.min_lr_factor", same=(1, 1.0), changes=True),
    *lite_options(f"{_A}.engine.", "megatron"),
    Option(f"{_A}.engine.*_offload", "megatron.offload", "true if any is True", derived=True),
    *no_counterpart("megarl trains with Megatron", f"{_A}.torchtitan.*", f"{_A}.veomni.*", f"{_A}.engine.*", "actor@actor_rollout_ref.actor", "hydra.searchpath", f"{_A}.model_engine", f"{_A}.data_loader_seed", f"{_A}.use_prefix_grouper", f"{_A}.megatron.use_megatron_fsdp"),
    *no_counterpart("megarl decides it", f"{_A}.pad_to_length*", f"{_A}.megatron.sequence_parallel", f"{_A}.megatron.use_remove_padding", f"{_R}.skip_tokenizer_init", f"{_R}.layered_summon", f"{_R}.disable_log_stats", f"{_R}.enable_sleep_mode", f"{_R}.multi_stage_wake_up", f"{_R}.cudagraph_capture_sizes", f"{_R}.checkpoint_engine.*"),
    *(Option(f"{_R}.{side}_length", None, f"data.max_{side}_length, whose value it must have", derived=True) for side in ("prompt", "response")),
    *no_counterpart("verl does not read it", f"{_R}.over_sample_rate", "data.min_response_length"),
    *no_counterpart("see docs/metrics.md", f"{_R}.prometheus.*"),
    *no_counterpart("requests go to the engine with the fewest groups", f"{_R}.engine_kwargs.dynamo.*"),
    *no_counterpart("it belongs to TensorRT-LLM", f"{_R}.moe_tensor_parallel_size", f"{_R}.engine_kwargs.trtllm.*"),
    *no_counterpart("see observe.samples", f"{_R}.trace.*"),
    *no_counterpart("every step samples anew", "skip.*"),
    *no_counterpart("code runs in megarl's sandbox (docs/sandbox.md)", "*reward_model.sandbox_fusion.*", "reward.sandbox_fusion.*", "sandbox_fusion.*"),
    *no_counterpart("algorithm.advantage=gae has a critic", "critic.enable"),
    Option(f"{_R}.name", "rollout.engine", names={"vllm": "vllm", "sglang": "sglang", "dynamo": "vllm"}),
    Option(f"{_R}.engine_kwargs.sglang.*", "rollout.engine_args.*", SAME_NAME),
    Option(f"{_R}.mode", None, "engines always run in separate processes"),
    Option(f"{_R}.load_format", None, "engines receive their weights from the trainers"),
    Option(f"{_R}.n", "rollout.samples_per_prompt"),
    Option(f"{_R}.tensor_model_parallel_size", "rollout.tensor_parallel, rollout.engines", "engines: devices / this value", derived=True),
    Option(f"{_R}.data_parallel_size", "rollout.data_parallel", "always with expert parallelism"),
    Option(f"{_R}.expert_parallel_size", "rollout.expert_parallel", "true if above 1 and rollout.data_parallel is 1", derived=True),
    Option(f"{_R}.engine_kwargs.vllm.enable_expert_parallel", "rollout.expert_parallel"),
    Option(f"{_R}.temperature", "rollout.temperature"),
    Option(f"{_R}.top_p", "rollout.top_p"),
    Option(f"{_R}.top_k", "rollout.top_k"),
    Option(f"{_R}.dtype", "rollout.dtype"),
    *(Option(f"{_R}.{name}", f"rollout.engine_args.{name}") for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching")),
    Option(f"{_R}.max_model_len", None, "always data.max_prompt_length + rollout.max_response_length; less is refused"),
    Option(f"{_R}.engine_kwargs.vllm.*", "rollout.engine_args.*", SAME_NAME),
    Option(f"{_R}.val_kwargs.n", "evaluation.samples"),
    Option(f"{_R}.val_kwargs.temperature", "evaluation.temperature", "also if do_sample is False, which verl's validation does not read", derived=True),
    Option(f"{_R}.val_kwargs.do_sample", None, "verl's validation does not read it"),
    Option(f"{_R}.val_kwargs.top_p", "evaluation.top_p"),
    Option(f"{_R}.val_kwargs.top_k", None, "evaluation never limits sampling to the top k", same=(-1, 0)),
    Option("actor_rollout_ref.hybrid_engine", None, "use cluster.placement"),
    Option("actor_rollout_ref.nccl_timeout", "cluster.timeout"),
    Option("critic.model.path", "critic.model_path"),
    Option("critic.optim.lr", "critic.optimizer.lr"),
    Option("critic.optim.weight_decay", "critic.optimizer.weight_decay"),
    Option("critic.optim.betas", "critic.optimizer.betas"),
    Option("critic.optim.clip_grad", "critic.optimizer.clip_grad"),
    Option("critic.optim.min_lr_ratio", "critic.optimizer.min_lr_ratio"),
    Option("critic.grad_clip", None, "verl reads critic.optim.clip_grad"),
    *(Option(f"critic.optim.{name}", "critic.optimizer.decay", names={"constant": "constant", "cosine": "cosine", "linear": "linear"}) for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")),
    Option("critic.optim.lr_warmup_steps", "critic.optimizer.warmup_steps", "x the critic's optimizer steps per step", derived=True),
    Option("critic.optim.lr_warmup_steps_ratio", "critic.optimizer.warmup_steps", "x the number of the critic's optimizer steps", derived=True),
    Option("critic.optim.lr_decay_steps", "critic.optimizer.decay_steps", "x the critic's optimizer steps per step", derived=True),
    Option("critic.optim.min_lr", "critic.optimizer.min_lr_ratio", "divided by lr", derived=True),
    *optimizer_overrides("critic.optim", "optimizer states in host memory: critic.optimizer.extra.optimizer_cpu_offload or critic.megatron.extra.swap_optimizer"),
    Option("critic.ppo_mini_batch_size", "critic.mini_batches", "data.train_batch_size / this value; if unset, the actor's", derived=True),
    Option("critic.cliprange_value", "critic.value_clip"),
    Option("critic.ppo_epochs", "critic.epochs", "if unset, the actor's", derived=True),
    *layout_options("critic.megatron.", "critic.megatron"),
    Option("critic.ulysses_sequence_parallel_size", "critic.megatron.tensor_parallel", ULYSSES, derived=True),
    Option("critic.model.enable_gradient_checkpointing", "critic.megatron.recompute", names={True: "full", False: "none"}),
    Option("critic.*_offload", "critic.megatron.offload", "true if any is True", derived=True),
    *no_counterpart(_TOKENS, "critic.ppo_micro_batch_size*", "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu", "critic.forward_*"),
    *no_counterpart(_FSDP, "critic.strategy", "critic.model.fsdp_config.*", "critic.model.use_remove_padding"),
    *OF_REWARD,
    Option("distillation.enabled", "algorithm.reference", "True is teacher", derived=True),
    Option("distillation.distillation_loss.loss_mode", "algorithm.loss, algorithm.advantage, algorithm.kl_estimator", "k1 with use_policy_gradient is on_policy_distillation; forward_kl_topk is gkd; with use_task_rewards it is a KL to the teacher", derived=True),
    Option("distillation.distillation_loss.topk", "algorithm.distill_top_k", derived=True),
    Option("distillation.distillation_loss.log_prob_min_clamp", "algorithm.distill_min_log_prob", derived=True),
    Option("distillation.distillation_loss.loss_max_clamp", "algorithm.distill_max", derived=True),
    Option("distillation.distillation_loss.distillation_loss_coef", "algorithm.kl_coef", "with use_task_rewards", derived=True),
    Option("distillation.distillation_loss.*", "algorithm.advantage, algorithm.clip_low, algorithm.clip_high", "others are refused if enabled is True", derived=True),
    Option("distillation.teacher_models.teacher_model.model_path", "teacher.path", derived=True),
    Option("distillation.teacher_models.*.model_path", "teacher.path, teacher.by_source", "several teachers: by_source", derived=True),
    Option("distillation.teacher_models.*.key", "teacher.by_source", "the row's data_source; with one teacher every row is its", derived=True),
    Option("distillation.teacher_models.*.num_replicas", "teacher.engines, teacher.by_source", "of a named teacher", derived=True),
    Option("distillation.teacher_models.*.inference.tensor_model_parallel_size", "teacher.tensor_parallel, teacher.engines", "engines of teacher_model: devices / this value", derived=True),
    Option("distillation.teacher_models.*.inference.gpu_memory_utilization", "teacher.engine_args.gpu_memory_utilization", derived=True),
    Option("distillation.n_gpus_per_node", "teacher.engines", "x distillation.nnodes / tensor_model_parallel_size", derived=True),
    Option("distillation.nnodes", "teacher.engines", derived=True),
    *no_counterpart("use teacher.engine_args", "distillation.teacher_models.*.inference.*"),
    Option("distillation.teacher_key", "teacher.by_source", "data_source; others are refused with several teachers", derived=True),
    Option("distillation.*", "algorithm.reference", "others are refused if enabled is True", derived=True),
    *OF_SAMPLING,
    Option("trainer.critic_warmup", "critic.warmup_steps"),
    Option("rollout.*", "rollout.engines", "one-step-off's devices for sampling", derived=True),
]  # fmt: skip

TRAINER = [
    Option("trainer.experiment_name", "name", derived=True),
    Option("trainer.project_name", "observe.project"),
    Option("trainer.logger", "observe.trackers", "wandb, swanlab and mlflow; console and tensorboard are always on", derived=True),
    Option("trainer.nnodes", "cluster.trainers", "x trainer.n_gpus_per_node", derived=True),
    Option("trainer.n_gpus_per_node", "cluster.trainers", "x trainer.nnodes", derived=True),
    Option("trainer.device", "cluster.device"),
    Option("trainer.total_training_steps", "train.steps"),
    Option("trainer.total_epochs", "train.steps", "x rows / data.prompts_per_step: needs --rows", derived=True),
    Option("trainer.seed", "train.seed"),
    Option("trainer.test_freq", "evaluation.every, evaluation.at_end", derived=True),
    Option("trainer.val_before_train", "evaluation.at_start", derived=True),
    Option("trainer.save_freq", "train.save_every, train.save_at_end", derived=True),
    Option("trainer.max_actor_ckpt_to_keep", "train.keep_checkpoints"),
    Option("trainer.max_ckpt_to_keep", "train.keep_checkpoints"),
    Option("trainer.resume_mode", "train.resume", "with resume_path give model.path, the exported weights, after the file", names=RESUME, changes=True),
    Option("trainer.max_critic_ckpt_to_keep", None, "a checkpoint has both actor and critic"),
    *no_counterpart("the files of a run are in runs_dir/name", "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.resume_from_path", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.log_val_generations", "trainer.tensorboard_dir", "trainer.rl_logging_board_dir"),
    *no_counterpart("a run trains; megarl eval evaluates a checkpoint", "trainer.val_only", same=(None, False), changes=True),
    Option("trainer.use_legacy_worker_impl", None, "it selects one of verl's implementations"),
]  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512, "data.truncation": "error",
    "algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": 0.2, "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384, "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_penalty": "kl",
    "actor_rollout_ref.rollout.n": 1, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5, "actor_rollout_ref.rollout.max_num_seqs": 256,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 8192, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
    "trainer.val_before_train": True, "trainer.resume_mode": "auto", "trainer.save_freq": -1, "trainer.total_epochs": 30,
}  # fmt: skip
"""verl's defaults (verl/trainer/config/), where megarl or one of its losses has another default."""
