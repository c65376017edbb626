"""verl's side of the job: rows, reward, options and variables of `python -m verl.trainer.main_ppo`.

verl's processes import this file for the reward, so its top level needs nothing but the standard library.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.trl.job import FUNCTIONS, Job, record

METRICS = "verl.jsonl"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the prompt's text alone, as in megarl and TRL
)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    score: str,
    record_path: str,
    **_: Any,
) -> float:
    """Score a sample of verl and record it: `reward.custom_reward_function` of verl's configuration."""
    del data_source, extra_info
    reward = FUNCTIONS[score](solution_str, ground_truth)
    record(record_path, [reward])
    return reward


def write_rows(job: Job, path: Path) -> None:
    """Write the job's rows with the prompts as chats of one message, the only form that verl's data set reads."""
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in chats))


def variables(job: Job, folder: Path) -> dict[str, str]:
    """Return the environment variables that make verl run on the CPU, and its metrics a file in `folder`."""
    return {
        "VERL_FILE_LOGGER_PATH": str(folder / METRICS),
        "TQ_NUM_THREADS": str(job.threads),
        "VERL_USE_EXTERNAL_MODULES": "benchmarks.verl.cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu; the same class runs on a CPU
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HYDRA_FULL_ERROR": "1",
    }


def options(job: Job, folder: Path) -> list[str]:
    """Return the options of verl.trainer.main_ppo for the job; `folder` receives the rows, the record and the metrics."""
    write_rows(job, rows := folder / "verl_rows.jsonl")
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    return [
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"data.train_batch_size={job.prompts}",
        f"data.max_prompt_length={job.prompt_limit}",
        f"data.max_response_length={job.response}",
        f"data.seed={job.seed}",
        "data.dataloader_num_workers=0",
        f"{model}.path={job.model}",
        f'{model}.custom_chat_template="{TEMPLATE}"',
        f"{model}.enable_gradient_checkpointing=false",
        f"{model}.use_remove_padding=false",  # the packed form needs flash-attn
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.fsdp_config.seed={job.seed}",
        f"{actor}.optim.lr={job.learning_rate}",
        f"{actor}.optim.weight_decay=0",
        f"{actor}.clip_ratio={job.clip}",
        f"{actor}.clip_ratio_low={job.clip}",
        f"{actor}.clip_ratio_high={job.clip}",
        f"{actor}.ppo_mini_batch_size={job.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={job.micro_batch}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={job.micro_batch}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={job.samples}",
        f"{rollout}.dtype=float32",
        f"{rollout}.seed={job.seed}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.max_num_seqs={job.batch}",
        f"{rollout}.max_model_len={job.prompt_limit + job.response}",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.free_cache_engine=false",
        f"+{rollout}.enable_sleep_mode=false",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=512",
        f"{rollout}.agent.num_workers=1",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={job.cache_mib << 20}",
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls=benchmarks.verl.engine_worker.CpuWorkerExtension",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=compute_score",
        f"+reward.custom_reward_function.reward_kwargs={{score: {job.reward}, record_path: {folder / 'record'}}}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={job.steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.address=local",  # not the cluster of another command on this machine
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        f"+ray_kwargs.ray_init._temp_dir={folder / 'ray'}",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.num_gpus=1",  # pretended: Ray places the worker on it
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"hydra.run.dir={folder / 'hydra'}",
    ]


def response_lengths(folder: Path) -> list[float]:
    """Return the mean response tokens of each step from verl's metrics."""
    lines = [json.loads(line)["data"] for line in (folder / METRICS).read_text().splitlines()]
    return [line["response_length/mean"] for line in lines if "response_length/mean" in line]


def phases(folder: Path, skipped: int) -> dict[str, float]:
    """Return the median seconds of each phase of verl's metrics, without the first `skipped` steps."""
    lines = [json.loads(line)["data"] for line in (folder / METRICS).read_text().splitlines()]
    lines = [line for line in lines if "response_length/mean" in line][skipped:]  # the steps
    names = sorted({name for line in lines for name in line if name.startswith("timing_s/")})
    return {name[9:]: statistics.median(line.get(name, 0.0) for line in lines) for name in names}
