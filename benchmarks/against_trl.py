"""megarl against TRL on the same GRPO job: speed, memory, start and rewards, in runs that take turns.

    python -m venv trl_env && trl_env/bin/pip install trl==1.16.0
    python -m benchmarks.against_trl --trl-python trl_env/bin/python [--size 0.2M|20M|100M] [--moe] [--rounds 2]

Equal in both: the random Qwen3 in float32 (--moe: Qwen3-MoE with four experts), the quickstart's word problems, prompts per
step, group size, the longest response (an end-of-text token ends a response in both), learning rate (constant), AdamW with its
usual betas and without weight decay, gradient norm at most 1, clip range, no KL, token mean, one optimizer step for each batch,
no separate pass for old log-probs, temperature 1, seed, the Python function of the reward, and CPU threads: each process has
--threads of them, and trainers and engine take turns, so both frameworks compute on the same number of cores.

Samples of a micro batch are equal, too, and all samples of a step are drawn from one random generator. Each round has another seed,
the same for both.

TRL runs GRPOTrainer in one process with Hugging Face generation and its defaults, except no gradient checkpointing (on by
default, which is slower). megarl runs as a user starts it: `megarl train`, which uses Ray, and torchrun; one trainer, one vLLM
engine.

A step begins when the last sample of its batch is scored, and ends when the last sample of the next batch is. The reward function
records these times. The first two steps are left out. CPU seconds and memory (PSS) are of all processes of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.trl.figures import (
    SKIPPED,
    Figures,
    batches,
    figures_of,
    mean_rewards,
    read_record,
    rewards_table,
    table,
)
from benchmarks.trl.job import FUNCTIONS, SIZES, Job, end_early, environment, make_model, make_rows
from benchmarks.trl.process_tree import Usage, measure

ROOT = Path(__file__).parents[1]
TRL, RAY, TORCHRUN = "TRL", "megarl, Ray", "megarl, torchrun"


@dataclass
class Runs:
    """Results of one framework, a run in each round."""

    figures: list[Figures] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    phases: dict[str, float] = field(
        default_factory=dict
    )  # megarl: median seconds of the steady steps, of the last run


def trl_command(job: Job, folder: Path, python: str) -> list[str]:
    job.write(folder / "job.json")
    files = [str(folder / name) for name in ("job.json", "record", "trl.json")]
    return [python, "-m", "benchmarks.trl.trl_side", *files]


def megarl_settings(job: Job, folder: Path) -> list[str]:
    """Return the recipe's settings for the job."""
    return [
        "name=run",
        f"runs_dir={folder}",
        f"model.path={job.model}",
        "model.dtype=float32",
        f"data.train_files=[{job.rows}]",
        "data.chat_template=false",
        f"data.prompts_per_step={job.prompts}",
        f"data.max_prompt_length={job.prompt_limit}",
        f"rollout.samples_per_prompt={job.samples}",
        f"rollout.max_response_length={job.response}",
        "rollout.seeded=false",
        f"rollout.engine_args={{max_num_seqs: {job.batch}, kv_cache_memory_bytes: {job.cache_mib << 20}}}",
        "reward.function=benchmarks.trl.job:recorded_score",
        f"reward.arguments={{name: {job.reward}, path: {folder / 'record'}}}",
        "reward.processes=1",
        "algorithm.advantage=grpo",
        "algorithm.old_log_probs=current",
        f"algorithm.clip_low={job.clip}",
        f"algorithm.clip_high={job.clip}",
        f"actor.max_tokens_per_micro_batch={job.micro_batch * (job.prompt_limit + job.response)}",
        f"actor.optimizer.lr={job.learning_rate}",
        "actor.optimizer.weight_decay=0",
        "cluster.device=cpu",
        f"cluster.threads={job.threads}",
        f"train.steps={job.steps}",
        f"train.seed={job.seed}",
        "train.save_at_end=false",
    ]


def megarl_command(job: Job, folder: Path, over: str, more: Sequence[str]) -> list[str]:
    (folder / "recipe.yaml").write_text("name: run\n")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone"] if over == TORCHRUN else []
    return [
        sys.executable, *torchrun, "-m", "megarl", "train", str(folder / "recipe.yaml"), *megarl_settings(job, folder), *more,
    ]  # fmt: skip


def trl_lengths(folder: Path) -> list[float]:
    """Return the mean response tokens of each step from TRL's log."""
    lines: list[dict[str, Any]] = json.loads((folder / "trl.json").read_text())
    return [line["completions/mean_length"] for line in lines if "completions/mean_length" in line]


def megarl_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def measured_run(
    name: str, command: Sequence[str], env: Mapping[str, str], job: Job, folder: Path, limit: float
) -> tuple[list[list[tuple[float, float]]], Usage]:
    """Run `command`, which records its samples in `folder`/record, and return the batches of `batches` and its usage.

    Raises RuntimeError with the end of its output if it fails or takes more than `limit` seconds.
    """
    usage = measure(command, env, ROOT, folder / "output", limit)
    if usage.code != 0:
        end = (folder / "output").read_text(errors="replace")[-3000:]
        problem = f"exceeded --limit {limit:.0f} s" if usage.code is None else f"ended with status {usage.code}"
        raise RuntimeError(f"{name} {problem}. Its command: {' '.join(command)}\nThe end of its output:\n{end}")
    return batches(read_record((folder / "record").read_text()), job.batch), usage


def run_once(name: str, job: Job, options: argparse.Namespace, runs: Runs) -> None:
    """Run one framework, and add its results to `runs`. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        command = (
            trl_command(job, folder, options.trl_python)
            if name == TRL
            else megarl_command(job, folder, name, options.set)
        )
        steps, usage = measured_run(name, command, environment(job.threads), job, folder, options.limit)
        if name == TRL:
            lengths = trl_lengths(folder)
        else:
            lines = megarl_lines(folder)
            lengths = [line["response_length/mean"] for line in lines]
            runs.phases = steady_phases(lines)
        runs.figures.append(figures_of(steps, lengths, usage))
        runs.rewards.append(mean_rewards(steps))


def steady_phases(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase, `timing_s/...` of metrics.jsonl, over the steady steps."""
    names = sorted({name for line in lines[SKIPPED:] for name in line if name.startswith("timing_s/")})
    return {name[9:]: statistics.median(line.get(name, 0.0) for line in lines[SKIPPED:]) for name in names}


def check_trl(python: str) -> None:
    """Raise SystemExit unless `python` imports TRL."""
    remedy = (
        "Make one: python -m venv trl_env && trl_env/bin/pip install trl==1.16.0; then --trl-python trl_env/bin/python"
    )
    if shutil.which(python) is None:
        raise SystemExit(f"--trl-python {python} does not exist or cannot be run. {remedy}")
    version = subprocess.run([python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True)
    if version.returncode:
        raise SystemExit(f"--trl-python {python} cannot import trl: {version.stderr.strip()[-300:]} {remedy}")
    print(f"TRL {version.stdout.strip()}", flush=True)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    arguments.add_argument("--only", nargs="+", choices=(TRL, RAY, TORCHRUN), default=(TRL, RAY, TORCHRUN))
    add_job_options(arguments)
    return arguments


def add_job_options(arguments: argparse.ArgumentParser) -> None:
    """Add the options of `job_of`, --rounds, --limit and --set, the settings of megarl's recipe."""
    arguments.add_argument("--size", choices=SIZES, default="0.2M", help="parameters of the random model")
    arguments.add_argument("--moe", action="store_true", help="Qwen3-MoE with four experts, two for each token")
    arguments.add_argument("--model", help="a starting model instead of the random one, e.g. runs/quickstart-sft/hf")
    arguments.add_argument("--reward", choices=FUNCTIONS, default="digits", help="accuracy needs --model")
    arguments.add_argument("--prompts", type=int, help="prompts per step; default by size: 32, 8, 2")
    arguments.add_argument("--samples", type=int, default=8, help="samples per prompt")
    arguments.add_argument("--response", type=int, default=48, help="longest response, in tokens")
    arguments.add_argument("--steps", type=int, default=8, help="steps of each run")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each process")
    arguments.add_argument("--set", nargs="*", default=(), help="further settings of megarl's recipe")
    arguments.add_argument(
        "--micro-batch", type=int, help="samples of a forward and backward pass; default by size: 64, 8, 8"
    )
    arguments.add_argument("--learning-rate", type=float, help="default by size")
    arguments.add_argument("--mean-response", type=float, help="long-tailed lengths with about this mean, in tokens")
    arguments.add_argument("--limit", type=float, default=1800, help="seconds of a run")
    arguments.add_argument("--seed", type=int, default=0, help="of the first round; the next ones count up")


def job_of(options: argparse.Namespace, folder: Path) -> Job:
    """Write the model and the rows, and return the job."""
    size = SIZES[options.size]
    model = (
        str(Path(options.model).absolute())
        if options.model
        else make_model(folder, options.size, options.moe, options.seed)
    )
    if options.mean_response:
        end_early(model, options.mean_response)
    make_rows(rows := folder / "rows.jsonl", 512, options.seed)
    return Job(
        model=model,
        rows=str(rows),
        prompts=options.prompts or size.prompts,
        samples=options.samples,
        response=options.response,
        prompt_limit=64,
        cache_mib=size.cache_mib,
        learning_rate=options.learning_rate or size.learning_rate,
        clip=0.2,
        steps=options.steps,
        seed=options.seed,
        threads=options.threads,
        micro_batch=options.micro_batch or size.micro_batch,
        reward=options.reward,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.steps < SKIPPED + 2:
        raise SystemExit(
            f"--steps is {options.steps}, and the first {SKIPPED} are left out: take at least {SKIPPED + 2}"
        )
    check_trl(options.trl_python)
    results = {name: Runs() for name in options.only}
    with tempfile.TemporaryDirectory() as text:
        job = job_of(options, Path(text))
        print(f"{options.size} {job.prompts} x {job.samples} samples, load {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(options.rounds):
            for name in list(results)[:: 1 if number % 2 == 0 else -1]:
                run_once(name, replace(job, seed=job.seed + number), options, results[name])
                print(f"round {number + 1}: {name} {results[name].figures[-1]}", flush=True)
    print("\n" + table({name: runs.figures for name, runs in results.items()}, next(iter(results))))
    print("\n" + rewards_table({name: runs.rewards for name, runs in results.items()}))
    for name, runs in results.items():
        if runs.phases:
            print(f"\n{name}, s: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in runs.phases.items()))
    print(f"\n{os.cpu_count()} cores, load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
