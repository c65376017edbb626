"""Table of verl's options and the corresponding settings of megarl. `Conversion.apply` applies it.

`RL` has the options of verl.trainer.main_ppo and of the entry points of DAPO, one-step-off and, with the options of
`fully_async.py`, fully asynchronous training. `SFT` has the options of
fsdp_sft_trainer and sft_trainer. ``*`` in the name of an option matches any text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option of verl.

    to: the recipe's key, or several keys separated by ", "; None: no counterpart, and `remark` has the reason.
    names: verl's value -> megarl's value. If it is not empty, other values have no counterpart.
    derived: a translate_* function computes the value from several options, as `remark` describes.
    same: values of an option without counterpart that match what megarl always does.
    changes: a recipe without the option computes something else.
    """

    verl: str
    to: str | None = None
    remark: str = ""
    names: dict[Any, Any] = field(default_factory=dict)
    derived: bool = False
    same: tuple[Any, ...] = ()
    changes: bool = False


def _none(remark: str, *options: str, same: tuple[Any, ...] = (), changes: bool = False) -> list[Option]:
    return [Option(option, None, remark, same=same, changes=changes) for option in options]


_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ACTOR = _A
LOSS_MODE = f"{_A}.policy_loss.loss_mode"
OF_POLICY_LOSS = ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

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
    "geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro",
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
_SAME_NAME = "same name in megarl"
_ULYSSES = "tensor parallelism of the same size, which also splits sequences"
_ALWAYS = "megarl always does this"
_FSDP = "an FSDP option; megarl trains with Megatron"
_TOKENS = "micro batches are measured in tokens; actor.max_tokens_per_micro_batch also applies to the log-prob passes"
_REFERENCE = "the actor's processes compute the reference policy, in the actor's layout"
_BY_ROW = "each sample is scored separately: by reward.function, or by the scorer of its data_source (docs/rewards.md)"

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
    Option("data.apply_chat_template_kwargs.*", "data.chat_template_args.*", _SAME_NAME),
    Option("data.prompt_key", "data.columns.prompt"),
    Option("data.image_key", "data.columns.images"),
    Option("data.video_key", "data.columns.videos"),
    Option("data.reward_fn_key", "data.columns.data_source"),
    Option("data.custom_cls.path", "data.train_files, data.eval_files", "files that `megarl data verl_dataset` writes with the class: a note has the commands", derived=True),
    Option("data.custom_cls.name", "data.train_files, data.eval_files", "see data.custom_cls.path", derived=True),
    *_none("rows come in the order of data.shuffle and data.curriculum", "data.sampler.*", same=(None,), changes=True),
    *_none("rows are fixed before the run", "data.datagen.*", same=(None,), changes=True),
    *_none("the preparation of rows has no setting", "data.filter_overlong_prompts_workers", "data.dataloader_num_workers", "data.return_raw_chat", "data.return_raw_input_ids"),
    Option("algorithm.adv_estimator", "algorithm.advantage", names=ADVANTAGES),
    *_none("algorithm.advantage determines it", f"{_A}.calculate_sum_pi_squared", f"{_A}.sum_pi_squared_checkpointing"),
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
        *_none("it selects one of verl's implementations", f"{prefix}.optimizer_impl", same=("torch.optim",)),
        *_none("the length of a run is train.steps", f"{prefix}.total_training_steps"),
        *_none("a cosine decay has half a period", f"{prefix}.num_cycles", same=(0.5,), changes=True),
        *_none("weight decay is constant", f"{prefix}.weight_decay_incr_style", same=("constant",), changes=True),
    )),
    *_none("warm-up starts at 0", f"{_A}.optim.lr_warmup_init", "critic.optim.lr_warmup_init", same=(0, 0.0), changes=True),
    *_none("AdamW is the only optimizer", f"{_A}.optim.optimizer", "critic.optim.optimizer", same=("AdamW", "adamw", "adam"), changes=True),
    *_none("optimizer states in host memory: actor.optimizer.extra.optimizer_cpu_offload or megatron.extra.swap_optimizer, depending on the device", f"{_A}.optim.override_optimizer_config*"),
    *_none("it selects verl's trainers; megarl trains with Megatron", f"{_A}.strategy", "model_engine", same=("megatron",)),
    Option(f"{_A}.megatron.tensor_model_parallel_size", "megatron.tensor_parallel"),
    Option(f"{_A}.megatron.pipeline_model_parallel_size", "megatron.pipeline_parallel"),
    Option(f"{_A}.megatron.virtual_pipeline_model_parallel_size", "megatron.virtual_pipeline"),
    Option(f"{_A}.megatron.context_parallel_size", "megatron.context_parallel"),
    Option(f"{_A}.megatron.expert_model_parallel_size", "megatron.expert_parallel"),
    Option(f"{_A}.megatron.expert_tensor_parallel_size", "megatron.expert_tensor_parallel", "if unset, and expert parallelism is on: the tensor-parallel size, as in Megatron", derived=True),
    Option(f"{_A}.megatron.use_distributed_optimizer", "megatron.distributed_optimizer"),
    Option(f"{_A}.megatron.*_offload", "megatron.offload", "true if any is True", derived=True),
    Option(f"{_A}.megatron.override_transformer_config.recompute_granularity", "megatron.recompute", names={"full": "full", "selective": "selective", None: "none"}),
    Option(f"{_A}.megatron.override_transformer_config.recompute_*", None, "megatron.recompute=full recomputes every layer, one at a time"),
    Option(f"{_A}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage", "megatron.first_stage_layers"),
    Option(f"{_A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage", "megatron.last_stage_layers"),
    Option(f"{_A}.megatron.override_transformer_config.pipeline_num_transformer_layers", None, "use megatron.first_stage_layers and last_stage_layers"),
    *_none(_CONFIG, *(f"{_A}.megatron.override_transformer_config.{name}*" for name in ("multi_head_latent_attention", "rope_scaling", "yarn_", "seq_length"))),
    Option(f"{_A}.megatron.override_transformer_config.*", "megatron.extra.*", _SAME_NAME),
    Option(f"{_A}.megatron.override_ddp_config.*", "megatron.ddp.*", _SAME_NAME),
    *_none("mbridge loads Hugging Face weights; a run reads only its checkpoints", f"{_A}.megatron.use_mbridge", f"{_A}.megatron.vanilla_mbridge", f"{_A}.megatron.use_dist_checkpointing", f"{_A}.megatron.dist_checkpointing_path", f"{_A}.load_weight"),
    Option(f"{_A}.ulysses_sequence_parallel_size", "megatron.tensor_parallel", _ULYSSES, derived=True),
    Option(f"{_A}.fsdp_config.*_offload", "megatron.offload", "true if any is True", derived=True),
    Option("actor_rollout_ref.model.enable_gradient_checkpointing", "megatron.recompute", names={True: "full", False: "none"}),
    *_none(_FSDP, f"{_A}.fsdp_config.*", f"{_A}.use_torch_compile", f"{_A}.entropy_checkpointing", f"{_A}.entropy_from_logits_with_chunking", "actor_rollout_ref.model.use_liger", "actor_rollout_ref.model.use_fused_kernels"),
    *_none(_ALWAYS, "actor_rollout_ref.model.use_remove_padding", f"{_R}.free_cache_engine", f"{_R}.calculate_log_probs", "trainer.balance_batch", same=(True,)),
    *_none(_CONFIG, "actor_rollout_ref.model.override_config*", "actor_rollout_ref.model.trust_remote_code"),
    Option("actor_rollout_ref.model.lora_rank", "lora.rank", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.lora_alpha", "lora.alpha", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.target_modules", "lora.targets", "with FSDP", derived=True),
    Option("actor_rollout_ref.model.lora.rank", "lora.rank", "with Megatron", derived=True),
    Option("actor_rollout_ref.model.lora.alpha", "lora.alpha", "with Megatron", derived=True),
    Option("actor_rollout_ref.model.lora.target_modules", "lora.targets", "with Megatron: linear_fc1 is gate_proj and up_proj, ...", derived=True),
    Option("actor_rollout_ref.model.lora.merge", "weight_sync.adapters", "True is merged", derived=True),
    Option("actor_rollout_ref.model.lora.*", "lora.targets", "values that megarl's adapters lack are refused", derived=True),
    Option("actor_rollout_ref.model.lora_adapter_path", "lora.rank", "refused: a run starts with new adapters", derived=True),
    Option("actor_rollout_ref.model.exclude_modules", "lora.targets", "refused with adapters", derived=True),
    *_none("all of the critic's weights are trained", "critic.model.lora_rank", "critic.model.lora.rank", same=(0,), changes=True),
    *_none("all of the critic's weights are trained", "critic.model.lora*"),
    *_none(_TOKENS, f"{_R}.log_prob_*"),
    *_none(_REFERENCE, "actor_rollout_ref.ref.*"),
    Option(f"{_R}.multi_turn.enable", "agent.tools", "with tool_config_path; otherwise give agent.tools after the file", derived=True),
    Option(f"{_R}.multi_turn.max_assistant_turns", "agent.max_turns"),
    Option(f"{_R}.multi_turn.max_parallel_calls", "agent.max_calls_per_turn"),
    Option(f"{_R}.multi_turn.format", "agent.format", names={"hermes": "hermes"}),
    Option(f"{_R}.multi_turn.tool_config_path", "agent.tools, agent.tool_rewards", "the rewards of tools are for scorer alone, as in verl", derived=True),
    Option(f"{_R}.multi_turn.function_tool_path", "agent.tools", "refused: give agent.tools after the file", derived=True),
    *_none("the user's turns are the tools' answers, which agent.max_turns limits", f"{_R}.multi_turn.max_user_turns"),
    *_none("agent.max_answer_tokens limits tokens, not characters", f"{_R}.multi_turn.max_tool_response_length", f"{_R}.multi_turn.tool_response_truncate_side"),
    *_none("an agent loop has tools only", f"{_R}.multi_turn.interaction_config_path", same=(None,), changes=True),
    *_none("megarl's agent loop calls tools over several turns", f"{_R}.agent.default_agent_loop", same=(None, "single_turn_agent", "tool_agent"), changes=True),
    *_none("agent loops of one's own are not supported", f"{_R}.agent.agent_loop_config_path", f"{_R}.agent.agent_loop_manager_class", same=(None,), changes=True),
    *_none("agent.processes is per engine", f"{_R}.agent.num_workers"),
    Option(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", "weight_sync.bucket_mb"),
    *(Option(name, "megatron.routing_replay", names={"disabled": "none", "R2": "old_log_probs", "R3": "rollout"}) for name in (f"{_A}.*.router_replay.mode", f"{_A}.router_replay.mode")),
    *_none("megarl has no counterpart", f"{_R}.ignore_eos", f"{_R}.quantization", f"{_A}.*.qat.enable", "actor_rollout_ref.model.mtp.enable", "data.min_response_length", same=(None, False, 0), changes=True),
    Option(f"{_A}.ppo_micro_batch_size", "actor.max_tokens_per_micro_batch", "as ppo_micro_batch_size_per_gpu, of all devices", derived=True),
    *_none("verl's sapo reads actor.tau_pos and actor.tau_neg", f"{_A}.policy_loss.tau_pos", f"{_A}.policy_loss.tau_neg"),
    *_none("verl reads the option of the same name in actor.policy_loss", *(f"{_A}.{name}" for name in OF_POLICY_LOSS), changes=True),
    *_none("the weights are read, and nothing is dropped at random", f"{_A}.megatron.seed", "critic.megatron.seed"),
    *_none("samples keep their order within a step", f"{_A}.shuffle", same=(False,), changes=True),
    *_none("it belongs to qat, mtp or router_replay", f"{_A}.*.qat.*", "actor_rollout_ref.model.mtp.*", f"{_R}.enable_rollout_routing_replay"),
    *_none("see observe.profile", "*.profiler.*", "global_profiler.*"),
    *_none("Ray is started as the recipe's section cluster says", "ray_kwargs.*"),
    *_none("a checkpoint has weights, optimizer and positions", f"{_A}.checkpoint.*", "critic.checkpoint.*"),
    *_none("the rate stays above this share", f"{_A}.optim.min_lr_factor", same=(1, 1.0), changes=True),
    *_none("megarl trains with Megatron", f"{_A}.torchtitan.*", f"{_A}.veomni.*", f"{_A}.engine.*", f"{_A}.model_engine", f"{_A}.data_loader_seed", f"{_A}.use_prefix_grouper", f"{_A}.megatron.use_megatron_fsdp"),
    *_none("megarl decides it", f"{_A}.pad_to_length*", f"{_A}.megatron.dtype", f"{_A}.megatron.sequence_parallel", f"{_A}.megatron.use_remove_padding", f"{_R}.prompt_length", f"{_R}.response_length", f"{_R}.skip_tokenizer_init", f"{_R}.layered_summon", f"{_R}.disable_log_stats", f"{_R}.enable_sleep_mode", f"{_R}.multi_stage_wake_up", f"{_R}.cudagraph_capture_sizes", f"{_R}.checkpoint_engine.*"),
    Option(f"{_R}.name", "rollout.engine", names={"vllm": "vllm", "sglang": "sglang"}),
    Option(f"{_R}.engine_kwargs.sglang.*", "rollout.engine_args.*", _SAME_NAME),
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
    Option(f"{_R}.max_model_len", None, "always data.max_prompt_length + rollout.max_response_length"),
    Option(f"{_R}.engine_kwargs.vllm.*", "rollout.engine_args.*", _SAME_NAME),
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
    *_none("optimizer states in host memory: critic.optimizer.extra.optimizer_cpu_offload or critic.megatron.extra.swap_optimizer", "critic.optim.override_optimizer_config*"),
    Option("critic.ppo_mini_batch_size", "critic.mini_batches", "data.train_batch_size / this value; if unset, the actor's", derived=True),
    Option("critic.cliprange_value", "critic.value_clip"),
    Option("critic.ppo_epochs", "critic.epochs", "if unset, the actor's", derived=True),
    Option("critic.megatron.tensor_model_parallel_size", "critic.megatron.tensor_parallel"),
    Option("critic.megatron.pipeline_model_parallel_size", "critic.megatron.pipeline_parallel"),
    Option("critic.megatron.override_ddp_config.*", "critic.megatron.ddp.*", _SAME_NAME),
    Option("critic.ulysses_sequence_parallel_size", "critic.megatron.tensor_parallel", _ULYSSES, derived=True),
    Option("critic.model.enable_gradient_checkpointing", "critic.megatron.recompute", names={True: "full", False: "none"}),
    Option("critic.*_offload", "critic.megatron.offload", "true if any is True", derived=True),
    *_none(_TOKENS, "critic.ppo_micro_batch_size*", "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu", "critic.forward_*"),
    *_none(_FSDP, "critic.strategy", "critic.model.fsdp_config.*", "critic.model.use_remove_padding"),
    *(Option(f"{prefix}custom_reward_function.{name}", "reward.function", "path:name", derived=True) for prefix in ("", "reward.") for name in ("path", "name")),
    *(Option(f"{prefix}custom_reward_function.reward_kwargs*", "reward.arguments.*", "same name in megarl") for prefix in ("", "reward.")),
    *_none(_BY_ROW, "reward_model.reward_manager", "reward.reward_manager.name", same=(None, "naive", "dapo", "prime", "gdpo"), changes=True),
    *_none(_BY_ROW, "reward.reward_manager.*", "reward_model.reward_loop_*", same=(None, "register"), changes=True),
    *_none("always rollout.max_response_length", "reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"),
    *(option for prefix in OVERLONG for option in (
        Option(f"{prefix}.enable", "algorithm.overlong.penalty_buffer", "False is 0", derived=True),
        Option(f"{prefix}.len", "algorithm.overlong.penalty_buffer", "if enable is True", derived=True),
        Option(f"{prefix}.penalty_factor", "algorithm.overlong.penalty_factor", "if enable is True", derived=True),
        Option(f"{prefix}.log", None, "reward parts are always logged"),
    )),
    Option("distillation.enabled", "algorithm.reference", "True is teacher", derived=True),
    Option("distillation.distillation_loss.loss_mode", "algorithm.loss, algorithm.advantage, algorithm.kl_estimator", "k1 with use_policy_gradient is on_policy_distillation; forward_kl_topk is gkd; with use_task_rewards it is a KL to the teacher", derived=True),
    Option("distillation.distillation_loss.topk", "algorithm.distill_top_k", derived=True),
    Option("distillation.distillation_loss.loss_max_clamp", "algorithm.distill_max", derived=True),
    Option("distillation.distillation_loss.distillation_loss_coef", "algorithm.kl_coef", "with use_task_rewards", derived=True),
    Option("distillation.distillation_loss.*", "algorithm.advantage, algorithm.clip_low, algorithm.clip_high", "others are refused if enabled is True", derived=True),
    Option("distillation.teacher_models.teacher_model.model_path", "teacher.path", derived=True),
    Option("distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size", "teacher.tensor_parallel, teacher.engines", "engines: devices / this value", derived=True),
    Option("distillation.teacher_models.teacher_model.inference.gpu_memory_utilization", "teacher.engine_args.gpu_memory_utilization", derived=True),
    Option("distillation.n_gpus_per_node", "teacher.engines", "x distillation.nnodes / tensor_model_parallel_size", derived=True),
    Option("distillation.nnodes", "teacher.engines", derived=True),
    *_none("use teacher.engine_args", "distillation.teacher_models.teacher_model.inference.*"),
    *_none("megarl has one teacher", "distillation.teacher_key", "distillation.teacher_models.teacher_model.key", "distillation.teacher_models.teacher_model.num_replicas"),
    Option("distillation.*", "algorithm.reference", "others are refused if enabled is True", derived=True),
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
    Option("trainer.resume_mode", "train.resume", names=RESUME),
    Option("trainer.max_critic_ckpt_to_keep", None, "a checkpoint has both actor and critic"),
    *_none("the files of a run are in runs_dir/name", "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.resume_from_path", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.log_val_generations"),
    Option("trainer.use_legacy_worker_impl", None, "it selects one of verl's implementations"),
]  # fmt: skip

SFT = [
    Option("model.partial_pretrain", "model.path"),
    Option("model.path", "model.path"),
    Option("data.train_files", "data.train_files"),
    Option("data.val_files", "data.eval_files"),
    Option("data.train_batch_size", "data.prompts_per_step"),
    Option("data.max_length", "data.max_prompt_length, rollout.max_response_length", "the sum of the two is the limit for an example", derived=True),
    Option("data.truncation", "data.overlong_prompts", "error is error; examples are never truncated: left and right become filter", derived=True),
    Option("data.micro_batch_size_per_gpu", "actor.max_tokens_per_micro_batch", "x data.max_length, unless use_dynamic_bsz is True", derived=True),
    Option("data.max_token_len_per_gpu", "actor.max_tokens_per_micro_batch", "x the sequence-parallel size", derived=True),
    Option("data.use_dynamic_bsz", "actor.max_tokens_per_micro_batch", "selects one of the two options above", derived=True),
    Option("data.prompt_key", "data.columns.prompt", "with data.prompt_dict_keys: the field of it", derived=True),
    Option("data.prompt_dict_keys", "data.columns.prompt", "the field of data.prompt_key", derived=True),
    Option("data.response_key", "data.columns.response", "with data.response_dict_keys: the field of it", derived=True),
    Option("data.response_dict_keys", "data.columns.response", "the field of data.response_key", derived=True),
    Option("data.messages_key", "data.columns.messages", derived=True),
    Option("data.multiturn.messages_key", "data.columns.messages", derived=True),
    Option("data.tools_key", "data.columns.tools", derived=True),
    *_none("columns messages, or prompt and response, of the file decide", "data.multiturn.*"),
    *_none("the preparation of rows has no setting", "data.ignore_input_ids_mismatch", "data.pad_mode"),
    *_none("a class of demonstrations tokenizes them: write their messages as docs/data.md describes", "data.custom_cls.*", same=(None,), changes=True),
    Option("data.apply_chat_template_kwargs", "data.chat_template_args"),
    Option("data.apply_chat_template_kwargs.*", "data.chat_template_args.*", _SAME_NAME),
    Option("optim.lr", "actor.optimizer.lr"),
    Option("optim.betas", "actor.optimizer.betas"),
    Option("optim.weight_decay", "actor.optimizer.weight_decay"),
    Option("optim.clip_grad", "actor.optimizer.clip_grad"),
    Option("optim.min_lr_ratio", "actor.optimizer.min_lr_ratio"),
    Option("optim.lr_scheduler", "actor.optimizer.decay", names={"cosine": "cosine", "constant": "constant"}),
    Option("optim.lr_scheduler_type", "actor.optimizer.decay", names={"cosine": "cosine", "constant": "constant"}),
    Option("optim.lr_warmup_steps", "actor.optimizer.warmup_steps"),
    Option("optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps", "x train.steps", derived=True),
    Option("model.lora_rank", "lora.rank"),
    Option("model.lora_alpha", "lora.alpha"),
    Option("model.target_modules", "lora.targets"),
    Option("model.enable_gradient_checkpointing", "megatron.recompute", names={True: "full", False: "none"}),
    Option("ulysses_sequence_parallel_size", "megatron.tensor_parallel", _ULYSSES, derived=True),
    Option("engine.ulysses_sequence_parallel_size", "megatron.tensor_parallel", _ULYSSES, derived=True),
    Option("engine.tensor_model_parallel_size", "megatron.tensor_parallel"),
    Option("engine.pipeline_model_parallel_size", "megatron.pipeline_parallel"),
    Option("engine.context_parallel_size", "megatron.context_parallel"),
    *_none(_ALWAYS, "use_remove_padding", "model.use_remove_padding", same=(True,)),
    *_none("megarl trains with Megatron", "model.strategy", "engine", "engine.strategy", "model.fsdp_config.*", "engine.*", "optim", "model.use_liger"),
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

SFT_DEFAULTS: dict[str, dict[str, Any]] = {
    "fsdp_sft_trainer": {
        "data.train_batch_size": 256, "data.max_length": 1024, "data.micro_batch_size_per_gpu": 4, "data.truncation": "error",
        "data.prompt_key": "question", "data.response_key": "answer",
        "optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.lr_warmup_steps_ratio": 0.1, "optim.lr_scheduler": "cosine",
        "model.lora_alpha": 16, "model.enable_gradient_checkpointing": True, "trainer.seed": 1, "trainer.save_freq": -1,
        "trainer.resume_mode": "auto", "trainer.total_epochs": 4,
    },
    "sft_trainer": {
        "data.train_batch_size": 256, "data.max_length": 1024, "data.max_token_len_per_gpu": 8192, "data.use_dynamic_bsz": True,
        "data.truncation": "error", "optim.lr": 1e-3, "model.lora_alpha": 16, "model.enable_gradient_checkpointing": True,
        "trainer.seed": 1, "trainer.save_freq": -1, "trainer.resume_mode": "auto", "trainer.total_epochs": 4,
    },
}  # fmt: skip
