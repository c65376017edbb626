"""Recipes with one error each, the setting that `plan` must name, and words of its advice."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.damage import (
    ROW,
    Damage,
    a_run_there,
    a_shard_is_missing,
    a_tensor_is_not_in_the_index,
    config_cut_short,
    config_is_a_list,
    configured,
    index_is_no_json,
    no_config,
    no_parquet,
    no_tokenizer,
    no_weights,
    own_scorer,
    rows,
    runs_is_a_file,
    tokenizer_cut_short,
    weights_are_no_tensors,
    weights_cut_short,
    without_field,
)


@dataclass(frozen=True)
class Bad:
    """A recipe under recipes/ with an error. A quickstart recipe has its (damaged) files on this machine; `overrides` names
    their folder as HERE."""

    recipe: str
    overrides: tuple[str, ...]
    key: str
    words: str
    damage: Damage | None = None
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        broken = getattr(self.damage, "__name__", "")
        return "-".join(["/".join(self.recipe.split("/")[-1:]), *self.overrides, broken, *self.options])[:110]


def bad(recipe: str, overrides: str, key: str, words: str, damage: Damage | None = None, options: str = "") -> Bad:
    return Bad(f"{recipe}.yaml", tuple(overrides.split()), key, words, damage, tuple(options.split()))


MOE, V3, DENSE, PPO = "dapo_qwen3_30b", "grpo_deepseek_v3", "grpo_qwen3_8b", "ppo_qwen3_8b"
VL, LORA, OFF, GKD = "grpo_qwen2.5_vl_7b", "sft_peft_qwen3_8b", "one_step_off_qwen3_8b", "tiny/gkd"
QUICK, SFT, DPO = "quickstart", "quickstart_sft", "tiny/dpo"
JUDGED = "reward.function=judge judge.path=models/Qwen3-8B judge.prompt='{{response}}'"

LAYOUTS = [
    bad(DENSE, "cluster.trainers=12 megatron.tensor_parallel=8", "cluster.trainers", "use a multiple of 8"),
    bad(DENSE, "megatron.pipeline_parallel=3", "cluster.trainers", "use a multiple of 6"),
    bad(DENSE, "megatron.context_parallel=5", "cluster.trainers", "multiple of 10"),
    bad(DENSE, "cluster.trainers=24 megatron.tensor_parallel=24", "megatron.tensor_parallel", "may be 1, 2, 4, 8"),
    bad(MOE, "megatron.tensor_parallel=8", "megatron.tensor_parallel", "4 key/value heads"),
    bad("grpo_qwen2.5_0.5b", "megatron.tensor_parallel=4", "megatron.tensor_parallel", "14 attention heads"),
    bad(VL, "megatron.tensor_parallel=8", "megatron.tensor_parallel", "28 attention heads"),
    bad(DENSE, "cluster.trainers=16 megatron.pipeline_parallel=8", "megatron.pipeline_parallel", "36 layers"),
    bad(V3, "megatron.first_stage_layers=5", "megatron.first_stage_layers", "49 layers do not divide"),
    bad(V3, "megatron.last_stage_layers=null", "megatron.last_stage_layers", "Change megatron.pipeline_parallel"),
    bad(MOE, "megatron.first_stage_layers=20 megatron.last_stage_layers=20", "first_stage_layers", "8 layers remain"),
    bad(DENSE, "megatron.first_stage_layers=4", "megatron.first_stage_layers", "pipeline_parallel > 1"),
    bad(DENSE, "megatron.virtual_pipeline=2", "megatron.virtual_pipeline", "set megatron.pipeline_parallel > 1"),
    bad(MOE, "megatron.virtual_pipeline=5", "megatron.virtual_pipeline", "may be 1, 2, 3, 4"),
    bad(MOE, "megatron.virtual_pipeline=1", "megatron.virtual_pipeline", "at least 2"),
    bad(VL, "megatron.pipeline_parallel=2 megatron.virtual_pipeline=2", "megatron.virtual_pipeline", "Leave"),
    bad(DENSE, "megatron.expert_parallel=2", "megatron.expert_parallel", "this model is dense"),
    bad(DENSE, "megatron.expert_tensor_parallel=2", "megatron.expert_tensor_parallel", "this model is dense"),
    bad(MOE, "cluster.trainers=48 megatron.expert_parallel=3", "megatron.expert_parallel", "128 experts"),
    bad(MOE, "megatron.expert_parallel=8", "megatron.expert_parallel", "8 x 4 = 32"),
    bad(MOE, "cluster.trainers=40 megatron.expert_tensor_parallel=5 megatron.expert_parallel=1", "expert_tensor_parallel", "width of 768"),
    bad(MOE, "megatron.sequence_parallel=false", "megatron.sequence_parallel", "unset"),
    bad(DENSE, "megatron.tensor_parallel=1 megatron.sequence_parallel=true", "megatron.sequence_parallel", "leave it out"),
    bad(V3, "megatron.tensor_parallel=256 megatron.pipeline_parallel=1 megatron.first_stage_layers=null megatron.last_stage_layers=null", "megatron.tensor_parallel", "may be 1, 2, 4"),
    bad(VL, "megatron.packing=false", "megatron.packing", "needs megatron.packing=true"),
    bad(DENSE, "megatron.tensor_parallel=0", "megatron.tensor_parallel", "at least 1"),
    bad(PPO, "critic.trainers=7", "critic.trainers", "use a multiple of 2"),
    bad(PPO, "critic.megatron.tensor_parallel=16 critic.trainers=16 cluster.trainers=16", "critic.megatron.tensor_parallel", "key/value heads"),
    bad(PPO, "critic.megatron.expert_parallel=2", "critic.megatron.expert_parallel", "dense"),
]  # fmt: skip

ENGINES = [
    bad(DENSE, "rollout.tensor_parallel=4", "rollout.tensor_parallel", "cluster.placement=disaggregated"),
    bad(DENSE, "rollout.engines=8", "rollout.engines", "Use fewer or smaller engines"),
    bad(OFF, "rollout.tensor_parallel=3", "rollout.tensor_parallel", "choose a divisor of 32"),
    bad("grpo_qwen2.5_0.5b", "rollout.engines=1 rollout.tensor_parallel=7", "rollout.tensor_parallel", "2 key/value heads"),
    bad("grpo_qwen3_32b", "rollout.engines=1 rollout.tensor_parallel=32", "rollout.tensor_parallel", "each engine in one machine"),
    bad(V3, "rollout.data_parallel=3", "rollout.data_parallel", "choose a divisor"),
    bad(V3, "rollout.engines=96 rollout.data_parallel=96", "rollout.data_parallel", "256 experts do not divide"),
    bad(V3, "rollout.expert_parallel=false", "rollout.expert_parallel", "rollout.data_parallel=1"),
    bad(DENSE, "rollout.data_parallel=2", "rollout.data_parallel", "no experts to spread"),
    bad(DENSE, "rollout.expert_parallel=true", "rollout.expert_parallel", "no experts to spread"),
    bad(DENSE, "rollout.engine=vlm", "rollout.engine", "did you mean 'vllm'"),
    bad("grpo_qwen3_8b_sglang", "rollout.data_parallel=2", "rollout.data_parallel", "set it to 1"),
    bad(DENSE, "rollout.engine_args.max_num_sequences=64", "max_num_sequences", "did you mean 'max_num_seqs'"),
    bad(DENSE, "rollout.engine_args.gpu_memory_utilisation=0.9", "gpu_memory_utilisation", "gpu_memory_utilization"),
    bad(DENSE, "rollout.engine_args.max_model_len=4096", "engine_args.max_model_len", "data.max_prompt_length"),
    bad(DENSE, "rollout.engine_args.tensor_parallel_size=2", "tensor_parallel_size", "set rollout.tensor_parallel"),
    bad(DENSE, "rollout.engine_args.seed=1", "rollout.engine_args.seed", "set train.seed"),
    bad(DENSE, "rollout.engine_args.load_format=auto", "rollout.engine_args.load_format", "megarl sets it"),
    bad(DENSE, "rollout.engine_args.gpu_memory_utilization=1.5", "rollout.engine_args.gpu_memory_utilization", "at most 1"),
    bad(DENSE, "rollout.engine_args.gpu_memory_utilization=high", "gpu_memory_utilization", "number"),
    bad(DENSE, "rollout.engine_args.max_num_seqs=0", "rollout.engine_args.max_num_seqs", "above 0"),
    bad(DENSE, "rollout.engine_args.max_num_seqs=many", "rollout.engine_args.max_num_seqs", "whole number"),
    bad(DENSE, "rollout.engine_args.max_num_batched_tokens=16 rollout.engine_args.max_num_seqs=64", "max_num_batched_tokens", "max_num_seqs"),
    bad(DENSE, "rollout.engine_args.enforce_eager=yess", "rollout.engine_args.enforce_eager", "true or false"),
    bad("grpo_qwen3_8b_sglang", "", "rollout.engine_args", "is not installed here", None, "--strict"),
    bad(DENSE, "rollout.max_response_length=65536", "rollout.max_response_length", "context is 40960"),
    bad(DENSE, "data.max_prompt_length=40000 rollout.max_response_length=1000", "rollout.max_response_length", "lower the two"),
    bad(OFF, "rollout.max_staleness=1 cluster.placement=colocated", "rollout.max_staleness", "disaggregated"),
    bad(OFF, "rollout.max_staleness=0 rollout.at_update=refresh", "rollout.at_update", "max_staleness to 1"),
    bad(OFF, "rollout.at_update=keep train.deterministic=true", "rollout.at_update", "would not repeat"),
    bad(OFF, "rollout.at_update=refresh rollout.admission=wave", "rollout.admission", "no request runs"),
    bad(OFF, "rollout.at_update=keep rollout.engine_args.async_scheduling=true", "async_scheduling", "new weights"),
    bad("grpo_qwen3_8b_sglang", "cluster.placement=disaggregated rollout.max_staleness=1 rollout.at_update=refresh", "rollout.at_update", "sglang ends"),
    bad(VL, "cluster.placement=disaggregated megatron.offload=false rollout.max_staleness=1 rollout.at_update=keep", "rollout.at_update", "encoded images"),
    bad(DENSE, "rollout.window=1.5", "rollout.window", "at most 1"),
    bad(DENSE, "rollout.dtype=fp8", "rollout.dtype", "bfloat16"),
]  # fmt: skip

VALUES = [
    bad(DENSE, "rollout.temprature=1", "rollout.temprature", "did you mean rollout.temperature"),
    bad(DENSE, "rolout.temperature=1", "rolout", "did you mean rollout"),
    bad(DENSE, "megatron.tensor_paralel=2", "megatron.tensor_paralel", "tensor_parallel"),
    bad(DENSE, "lr=1e-6", "lr", "actor.optimizer.lr"),
    bad(DENSE, "rollout.temperature=hot", "rollout.temperature", "float"),
    bad(DENSE, "train.steps=ten", "train.steps", "int"),
    bad(DENSE, "train.steps=2.5", "train.steps", "int"),
    bad(DENSE, "train.steps=0", "train.steps", "at least 1"),
    bad(DENSE, "data.train_files={a}", "data.train_files", "list"),
    bad(DENSE, "data.train_files=[]", "data.train_files", "name .parquet or .jsonl files"),
    bad(DENSE, "model.path=", "model.path", "Hugging Face directory"),
    bad(DENSE, "model.dtype=float16", "model.dtype", "bfloat16"),
    bad(DENSE, "data.train_files=[data/dapo/train.csv]", "data.train_files", "docs/data.md"),
    bad(DENSE, "megatron=4", "megatron", "this is a section"),
    bad(DENSE, "megatron.offload=1", "megatron.offload", "true or false"),
    bad(DENSE, "cluster.device=tpu", "cluster.device", "npu"),
    bad(DENSE, "cluster.placement=shared", "cluster.placement", "colocated"),
    bad(DENSE, "rollout.top_p=1.5", "rollout.top_p", "at most 1"),
    bad(DENSE, "rollout.temperature=0", "rollout.temperature", "above 0"),
    bad(DENSE, "rollout.temperature=-1", "rollout.temperature", "above 0"),
    bad(DENSE, "rollout.top_k=0", "rollout.top_k", "use -1"),
    bad(DENSE, "rollout.temperature=0.7 rollout.top_p=0.9", "rollout.temperature", "rollout.temperature=1"),
    bad(DENSE, "actor.optimizer.lr=-1e-6", "actor.optimizer.lr", "at least 0"),
    bad(DENSE, "actor.optimizer.lr=.nan", "actor.optimizer.lr", "the value is NaN"),
    bad(DENSE, "actor.optimizer.lr=.inf", "actor.optimizer.lr", "finite"),
    bad(DENSE, "actor.optimizer.betas=[0.9,1.5]", "actor.optimizer.betas", "e.g."),
    bad(DENSE, "actor.optimizer.decay=exponential", "actor.optimizer.decay", "cosine"),
    bad(DENSE, "actor.mini_batches=3", "actor.mini_batches", "choose a divisor"),
    bad(DENSE, "data.prompts_per_step=0", "data.prompts_per_step", "at least 1"),
    bad(DENSE, "name=a/b", "name", "letters, digits"),
    bad(DENSE, f"name={'n' * 300}", "name", "letters, digits"),
    bad(DENSE, "algorithm.kl_coef=.inf", "algorithm.kl_coef", "finite"),
    bad(DENSE, "rollout.temperature=.inf", "rollout.temperature", "finite"),
    bad(DENSE, "actor.optimizer.lr=1e300", "actor.optimizer.lr", "smaller"),
    bad(DENSE, f"train.steps={'9' * 400}", "train.steps", "smaller"),
    bad(DENSE, "rollout.engines=1000000000", "rollout.engines", "at most 100000"),
    bad(DENSE, "cluster.trainers=1000000000", "cluster.trainers", "at most 100000"),
    bad(DENSE, "data.eval_files=[[a.jsonl]]", "data.eval_files", "list of texts"),
    bad(DENSE, f"name={'[' * 3000}", "name", "quote it"),
    bad(DENSE, "observe.trackers=[wandbb]", "observe.trackers", "wandb"),
    bad(DENSE, "observe.profile_ranks=[99] observe.profile_steps=[1]", "observe.profile_ranks", "use numbers from 0"),
    bad(DENSE, "megatron.tensor_parallel=2,4", "megatron.tensor_parallel", "int"),
    bad(DENSE, "train.steps", "train.steps", "key=value"),
    bad("grpo_qwen3_9b", "", "recipe", "did you mean"),
]  # fmt: skip

ALGORITHMS = [
    bad(DENSE, "algorithm.advantage=grpoo", "algorithm.advantage", "did you mean 'grpo'"),
    bad(DENSE, "algorithm.loss=ppo", "algorithm.loss", "ppo_clip"),
    bad(DENSE, "algorithm.aggregation=mean", "algorithm.aggregation", "token_mean"),
    bad(DENSE, "algorithm.kl_estimator=k3", "algorithm.kl_estimator", "low_var_kl"),
    bad(DENSE, "algorithm.gamma=0.9", "algorithm.gamma", "reads it"),
    bad(DENSE, "algorithm.kl_coef=0 algorithm.kl_estimator=kl", "algorithm.kl_estimator", "set algorithm.kl_coef"),
    bad(DENSE, "algorithm.loss=sft", "algorithm.loss", "train.source=sft"),
    bad(DENSE, "algorithm.loss=dpo", "algorithm.loss", "preferences"),
    bad(DENSE, "train.source=sft", "algorithm", "set"),
    bad(DENSE, "algorithm.advantage=none", "algorithm.advantage", "set algorithm.advantage=grpo"),
    bad(DENSE, "rollout.samples_per_prompt=1", "rollout.samples_per_prompt", "2 or more"),
    bad(DENSE, "algorithm.old_log_probs=current", "algorithm.old_log_probs", "actor.mini_batches=1"),
    bad(DENSE, "algorithm.kl_in_reward=true algorithm.old_log_probs=rollout", "algorithm.kl_in_reward", "computed"),
    bad(DENSE, "algorithm.kl_target=0.1 algorithm.kl_horizon=10", "algorithm.kl_horizon", "or more"),
    bad(DENSE, "algorithm.kl_horizon=500", "algorithm.kl_horizon", "set algorithm.kl_target"),
    bad(DENSE, "algorithm.correction.truncate=3", "algorithm.correction.truncate", "correction.weights"),
    bad(DENSE, "algorithm.correction.reject.token_ratio=[6,5]", "algorithm.correction.reject.token_ratio", "[0.5, 2.0]"),
    bad(DENSE, "algorithm.correction.icepop=[0.5,5] algorithm.correction.weights=sequence", "algorithm.correction.weights", "leave it out"),
    bad(DENSE, "algorithm.modules=[no_such_module_of_mine]", "algorithm.modules", "PYTHONPATH"),
    bad(DENSE, "algorithm.options={a:1}", "algorithm.options", "name their module"),
    bad(DENSE, "algorithm.overlong.penalty_buffer=4096", "algorithm.overlong.penalty_buffer", "set it to at most 1024"),
    bad(DENSE, "algorithm.advantage=pass_at_k algorithm.pass_k=9", "algorithm.pass_k", "set it to at most 5"),
    bad(DENSE, "algorithm.reference=teacher algorithm.kl_coef=0.1", "teacher.path", "directory"),
    bad(DENSE, "algorithm.reference=teacher", "teacher.path", "directory"),
    bad(DENSE, "teacher.path=models/Qwen3-32B", "teacher", "algorithm.reference=teacher"),
    bad(DENSE, "critic.trainers=2", "critic", "algorithm.advantage=gae"),
    bad(PPO, "critic.warmup_steps=100", "critic.warmup_steps", "fewer steps"),
    bad(PPO, "cluster.transport=torchrun", "cluster.transport", "ray"),
    bad(PPO, "critic.megatron.keep_logits=true", "critic.megatron.keep_logits", "leave it out"),
    bad(PPO, "critic.megatron.fp32_head=true", "critic.megatron.fp32_head", "leave it out"),
    bad(PPO, "critic.trainers=16", "critic.trainers", "cluster.placement=disaggregated"),
    bad(PPO, "critic.mini_batches=3", "critic.mini_batches", "choose a divisor"),
    bad(PPO, "critic.model_path=models/Qwen2.5-VL-7B-Instruct", "critic.model_path", "name a language model"),
    bad(VL, "algorithm.advantage=gae", "model.path", "critic.model_path"),
    bad(MOE, "megatron.routing_replay=old_log_probs algorithm.old_log_probs=rollout", "megatron.routing_replay", "rollout or none"),
    bad(DENSE, "megatron.routing_replay=old_log_probs", "megatron.routing_replay", "dense"),
    bad(DENSE, "megatron.moe_aux_loss_coef=0.1", "megatron.moe_aux_loss_coef", "dense"),
    bad(OFF, "megatron.offload=true", "megatron.offload", "megatron.offload=false"),
    bad(DENSE, "evaluation.ks=[4]", "evaluation.ks", "raise evaluation.samples"),
    bad(DENSE, "evaluation.samples=4", "evaluation.temperature", "evaluation.samples=1"),
    bad(DENSE, "data.eval_files=[]", "data.eval_files", "disable evaluation"),
    bad(LORA, "evaluation.samples=4", "evaluation.samples", "leave it out"),
    bad(LORA, "lora.targets=[]", "lora.targets", "all-linear"),
    bad(LORA, "lora.targets=[q_projj]", "lora.targets", "Did you mean q_proj"),
    bad(LORA, "lora.rank=0", "lora.rank", "set lora.rank"),
    bad(VL, "lora.rank=8", "lora.rank", "set lora.rank=0"),
    bad("dapo_qwen3_30b", "lora.rank=8 lora.targets=[up_proj]", "lora.targets", "add "),
    bad(DENSE, "reward.function=gsm9k", "reward.function", "did you mean 'gsm8k'"),
    bad(DENSE, "reward.function=no_such_module_of_mine:score", "reward.function", "PYTHONPATH"),
    bad(DENSE, "reward.function=no_such_file_of_mine.py:score", "reward.function", "no such file"),
    bad(DENSE, "reward.arguments.strict=true", "reward.arguments", "the reward has no"),
    bad(DENSE, "data.columns.promt=question", "data.columns.promt", "did you mean 'prompt'"),
    bad(DENSE, "data.columns.response=answer", "data.columns.response", "reads no column 'response'"),
    bad(DENSE, "data.columns.prompt=info.", "data.columns.prompt", "column.field"),
    bad(DENSE, "data.columns.reward_model=a data.columns.ground_truth=b", "data.columns.ground_truth", "leave one out"),
    bad(DENSE, "reward.functions.gsm8k=0", "reward.functions.gsm8k", "leave the scorer out"),
    bad(DENSE, "reward.functions={gsm8k:1}", "reward.functions", "a space follows the colon"),
    bad(DENSE, "reward.function=math reward.functions.gsm8k=1", "reward.functions", "set only one of the two"),
    bad(DENSE, "reward.function=remote", "reward.remote.url", "give its URL"),
    bad(DENSE, "reward.remote.url=https://a.example", "reward.remote", "reward.function=remote"),
    bad(DENSE, "reward.function=judge", "judge.path", "directory"),
    bad(DENSE, "judge.path=models/Qwen3-8B", "judge", "name judge in reward.function"),
    bad(DENSE, f"{JUDGED} judge.pattern=Score", "judge.pattern", "brackets"),
    bad(DENSE, f"{JUDGED} judge.temperature=0", "judge.attempts", "set it to 1"),
    bad(DENSE, f"{JUDGED} judge.max_prompt_length=65536", "judge.max_prompt_length", "lower the two"),
    bad(DENSE, f"{JUDGED} judge.engine_args.max_num_sequences=4", "judge.engine_args", "max_num_seqs"),
    bad(DENSE, f"{JUDGED} judge.tensor_parallel=3", "judge.tensor_parallel", "choose a divisor"),
    bad(GKD, "teacher.tensor_parallel=3", "teacher.tensor_parallel", "choose a divisor of 4"),
    bad(GKD, "rollout.temperature=0.7", "rollout.temperature", "set it to 1"),
    bad(GKD, "algorithm.reference=start", "algorithm.reference", "teacher"),
    bad(GKD, "teacher.engine=vllmm", "teacher.engine", "did you mean 'vllm'"),
    bad(GKD, "rollout.max_response_length=448", "teacher.path", "context is 512"),
    bad(DENSE, "agent.max_turns=3", "agent", "name a tool in agent.tools"),
    bad("retool", "data.chat_template=false", "data.chat_template", "true"),
]  # fmt: skip

MEGATRON = [
    bad(V3, "megatron.extra.swap_optimiser=true", "megatron.extra.swap_optimiser", "swap_optimizer"),
    bad(V3, "megatron.extra.reuse_fp32_param=true", "megatron.extra", "reuse_fp32_param"),
    bad(DENSE, "megatron.extra.num_layers=4", "megatron.extra.num_layers", "leave it out"),
    bad(DENSE, "megatron.extra.tensor_model_parallel_size=4", "megatron.extra", "set megatron.tensor_parallel"),
    bad(V3, "megatron.extra.moe_expert_capacity_factor=1.0", "megatron.extra", "moe_aux_loss_coef"),
    bad(V3, "megatron.extra.moe_grouped_gemm=1", "megatron.extra.moe_grouped_gemm", "true or false"),
    bad(V3, "megatron.extra.moe_token_dispatcher_type=all2all", "megatron.extra", "alltoall"),
    bad("gsm8k_tiny", "megatron.extra.swap_optimizer=true", "megatron.extra.swap_optimizer", "leave it out"),
    bad(MOE, "megatron.routing_replay=rollout megatron.extra.moe_router_fusion=true", "moe_router_fusion", "leave it out"),
    bad(PPO, "critic.megatron.extra.swap_optimiser=true", "critic.megatron.extra", "swap_optimizer"),
]  # fmt: skip


ROWS = "data.train_files=[HERE/data/rows.jsonl]"
OWN = "reward.function=own_scorer:score"

FILES = [
    bad(QUICK, "", "model.path", "config.json", no_config),
    bad(QUICK, "", "model.path", "correct the file", config_cut_short),
    bad(QUICK, "", "model.path", "own file", config_is_a_list),
    bad(QUICK, "", "model.path", "megarl trains", configured(model_type="gpt2")),
    bad(QUICK, "", "model.path", "model_type", without_field("model_type")),
    bad(QUICK, "", "model.path", "num_attention_heads", without_field("num_attention_heads")),
    bad(QUICK, "", "model.path", "num_hidden_layers", without_field("num_hidden_layers")),
    bad(QUICK, "", "model.path", "vocab_size", without_field("vocab_size")),
    bad(QUICK, "", "model.path", "positive integer", configured(num_attention_heads="four")),
    bad(QUICK, "", "model.path", "quantized", configured(quantization_config={"quant_method": "fp8"})),
    bad(QUICK, "", "model.path", "rotary scaling", configured(rope_scaling={"rope_type": "yarn", "factor": 4.0})),
    bad(QUICK, "", "model.path", "layer 2", configured(num_hidden_layers=4)),
    bad(QUICK, "", "rollout.max_response_length", "lower the two", configured(max_position_embeddings=64)),
    bad(QUICK, "", "model", "vocab_size is 300", configured(vocab_size=300)),
    bad(QUICK, "", "model.path", "save_pretrained", no_weights),
    bad(QUICK, "", "model.path", "cut short", weights_cut_short),
    bad(QUICK, "", "model.path", "not a safetensors file", weights_are_no_tensors),
    bad(QUICK, "", "model.path", "which is not there", a_shard_is_missing),
    bad(QUICK, "", "model.path", "leaves out model.layers.1", a_tensor_is_not_in_the_index),
    bad(QUICK, "", "model.path", "index.json cannot be read", index_is_no_json),
    bad(QUICK, "", "model.path", "no tokenizer", no_tokenizer),
    bad(QUICK, "", "model.path", "cannot load the tokenizer", tokenizer_cut_short),
    bad(QUICK, "model.tokenizer=HERE/data", "model.tokenizer", "no tokenizer"),
    bad(QUICK, "data.train_files=[HERE/data/trian.parquet]", "data.train_files", "train.parquet"),
    bad(QUICK, "data.eval_files=[HERE/data/tset.parquet]", "data.eval_files", "test.parquet"),
    bad(QUICK, "", "data.train_files", "readable parquet file", no_parquet),
    bad(QUICK, ROWS, "data.train_files", "no rows", rows("no_rows")),
    bad(QUICK, ROWS, "data.train_files", "is not JSON", rows("no_json", "{")),
    bad(QUICK, ROWS, "data.train_files", "not an object", rows("a_list", "[1]")),
    bad(QUICK, ROWS, "data.train_files", "no column 'prompt'", rows("no_prompt", {"question": "1+1?", **{k: v for k, v in ROW.items() if k != "prompt"}})),
    bad(QUICK, ROWS, "data.train_files", "'reward_model'", rows("no_truth", {k: v for k, v in ROW.items() if k != "reward_model"})),
    bad(QUICK, ROWS, "data.train_files", "no ground_truth", rows("other_truth", {**ROW, "reward_model": {"answer": "2"}})),
    bad(QUICK, ROWS, "data.train_files", "not messages or text", rows("number", {**ROW, "prompt": 7})),
    bad(QUICK, ROWS, "data.train_files", "{role, content}", rows("no_role", {**ROW, "prompt": [{"text": "1+1?"}]})),
    bad(QUICK, ROWS, "data", "openai/gsm8k", rows("misspelt_source", {**ROW, "data_source": "openai/gsm9k"})),
    bad(QUICK, ROWS, "reward", "correct the rows' ground_truth", rows("unreadable_truth", {**ROW, "reward_model": {"ground_truth": ["2"]}})),
    bad(QUICK, ROWS, "reward", "empty", rows("empty_truth", {**ROW, "reward_model": {"ground_truth": ""}})),
    bad(QUICK, ROWS, "data.max_prompt_length", "Raise the limit", rows("too_long", {**ROW, "prompt": "1+1? " * 99})),
    bad(QUICK, "data.max_prompt_length=4", "data.max_prompt_length", "Raise the limit"),
    bad(QUICK, "data.max_prompt_length=4 data.overlong_prompts=filter", "data.max_prompt_length", "Raise the limit"),
    bad(QUICK, "data.chat_template=true data.chat_template_args={enable_thinkin:false}", "data.chat_template", "never reads"),
    bad(QUICK, "data.curriculum=levle", "data.curriculum", "name one of these"),
    bad(QUICK, "data.min_pixels=3136", "data.min_pixels", "leave it out"),
    bad(SFT, "data.train_files=[HERE/data/train.parquet]", "data.train_files", "no column"),
    bad(SFT, "data.max_prompt_length=4 rollout.max_response_length=4", "data.max_prompt_length", "Raise the limit"),
    bad(DPO, "data.train_files=[HERE/data/sft.parquet]", "data.train_files", "'chosen'"),
    bad(QUICK, OWN, "reward.function", "division by zero", own_scorer("1/0")),
    bad(QUICK, OWN, "reward.function", "score", own_scorer("def scoer(request): return 1.0")),
    bad(QUICK, OWN, "reward.function", "ScoreRequest", own_scorer("def score(a, b): return 1.0")),
    bad(QUICK, "agent.tools=[code_interpeter] data.chat_template=true", "agent.tools", "code_interpreter"),
    bad(QUICK, "train.resume=HERE/nowhere/step_000010", "train.resume", "does not exist"),
    bad(QUICK, "train.resume=yes", "train.resume", "auto"),
    bad(QUICK, "", "runs_dir", "directory that can be written to", runs_is_a_file),
    bad(QUICK, "", "train.resume", "train.resume=auto", a_run_there, "--strict"),
    bad(QUICK, "data.eval_files=[HERE/elsewhere/test.parquet]", "data.eval_files", "not on this machine", None, "--strict"),
    bad(DENSE, "", "model.path", "not on this machine", None, "--strict"),
    bad(DENSE, "model.path=models/Qwen9-8B name=x", "model.path", "not on this machine", None, "--strict"),
]  # fmt: skip

SCORED = [  # in separate processes, which take a second to start
    bad(QUICK, OWN, "reward", "ZeroDivisionError", own_scorer("def score(request): return 1 / 0")),
    bad(QUICK, OWN, "reward", "not a number", own_scorer("def score(request): return 'good'")),
    bad(QUICK, f"{OWN} reward.timeout=1", "reward", "1", own_scorer("import time\ndef score(request): time.sleep(99)")),
]

OPTIONS = [
    bad(DENSE, "", "--device", "Nearest: H100", None, "--device H10O"),
    bad(DENSE, "", "--memory 0", "more than 0 GiB", None, "--memory 0"),
    bad(DENSE, "", "Qwen3-8b", "Nearest: Qwen3-8B", None, "--model Qwen3-8b"),
    bad("base/grpo", "model.path=nowhere data.train_files=[a/b.parquet]", "model.path", "# Shape: NAME"),
]

TOO_LARGE = [
    bad(DENSE, "megatron.tensor_parallel=1 megatron.recompute=none actor.max_tokens_per_micro_batch=65536", "update", "GiB", None, "--device 910B"),
    bad(DENSE, "rollout.engine_args.gpu_memory_utilization=0.1", "rollout.engine_args.gpu_memory_utilization", "GiB", None, "--device 910B"),
    bad("quickstart", "", "update", "MiB", None, "--memory 0.1"),
]  # fmt: skip

REFUSED = [*LAYOUTS, *ENGINES, *VALUES, *ALGORITHMS, *MEGATRON, *FILES, *OPTIONS]
