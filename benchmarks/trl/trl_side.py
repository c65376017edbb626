"""Train the job with TRL's GRPOTrainer. TRL's Python runs this file: python -m benchmarks.trl.trl_side JOB RECORD LOG."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.trl.job import FUNCTIONS, Job, record


def main() -> None:
    job, rewards_path, log = Job.read(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]

    def reward(completions: list[str], reward_model: list[dict[str, str]], **_: Any) -> list[float]:
        pairs = zip(completions, reward_model, strict=True)
        rewards = [FUNCTIONS[job.reward](text, row["ground_truth"]) for text, row in pairs]
        record(rewards_path, rewards)
        return rewards

    arguments = GRPOConfig(
        output_dir=str(log.parent / "trl"),
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.batch // job.micro_batch,
        num_generations=job.samples,
        max_completion_length=job.response,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=job.clip,
        beta=0.0,
        temperature=1.0,
        max_steps=job.steps,
        seed=job.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(model=job.model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows))
    trainer.train()
    log.write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
