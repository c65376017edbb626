"""Measure trained tokens per second of synchronous and asynchronous sampling, on a task with a long tail of lengths.

    python -m benchmarks.asynchrony [--paced] [--rounds 3] [--steps 30] [--engines 2] [--only sync,keep] [--out runs/asynchrony]

A tiny model first learns (SFT, about a minute) to give short answers to most prompts and 20 times longer ones to one in eight.
Then each schedule trains from this model with two engines and one trainer, at a learning rate of nearly 0, so that lengths stay.
The schedules take turns in each round; a ratio compares runs of the same round.

With --paced, each step of an engine and of the trainer takes seconds given by `PACE` (benchmarks/pacing.py), as on devices of
their own, and `megarl simulate`'s virtual clock predicts each run from these seconds and the lengths of its groups.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.asynchrony_prediction import predict
from benchmarks.pacing import Pace
from megarl.commands.data.tiny_model import make_tiny_model
from megarl.data.rows import write_parquet

ROOT = Path(__file__).parent.parent
SHORT, TAIL, LONGEST = 4, 20, 160  # mean tokens of a short answer; how much longer a long one is; limit
LONG_SHARE = 1 / 8
# Steps at the start and at the end that are not measured: engines fill, and have nothing left to start.
FIRST, LAST = 4, 3
APART = ["cluster.placement=disaggregated", "rollout.max_staleness=2"]
PROMPTS, SAMPLES = 16, 4  # of a step
PACE = Pace(step=0.04, request=0.0005, prefill=0.0001, train=0.0006, weight_sync=0.6, load=0.6)
SCHEDULES = {
    "sync": ["cluster.placement=colocated"],
    "drain": [*APART, "rollout.at_update=drain"],
    "finish": [*APART, "rollout.at_update=finish"],
    "refresh": [*APART, "rollout.at_update=refresh"],
    "keep": [*APART, "rollout.at_update=keep"],
    "colocated": ["cluster.placement=colocated", "rollout.max_staleness=2"],
}


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Return prompts, with answers of geometric lengths: long ones for prompts that begin with `Count far`."""
    order = random.Random(seed)
    result = []
    for index in range(count):
        is_long = order.random() < LONG_SHARE
        mean = SHORT * TAIL if is_long else SHORT
        length = 1
        while order.random() > 1 / mean and length < LONGEST - 2:
            length += 1
        result.append(
            {
                "data_source": "lengths",
                "prompt": f"Count {'far' if is_long else 'near'} from {index % 1000}:",
                "response": " a" * length,
                "reward_model": {"ground_truth": "a"},
                "extra_info": {"split": "train", "index": index},
            }
        )
    return result


def run(recipe: str, *overrides: str, pace: Pace | None = None) -> None:
    """Train. Raises CalledProcessError, after printing the output, if the run fails."""
    command = [sys.executable, "-m", "megarl", "train", recipe, *overrides, "observe.console=plain"]
    environment = dict(os.environ)
    if pace is not None:
        environment |= pace.environment() | {"PYTHONPATH": f"{ROOT / 'benchmarks' / 'paced_site'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()


def make_model(out: Path) -> tuple[Path, Path]:
    """Return a model that has learned the lengths, and the prompts for RL."""
    prompts, demonstrations = out / "prompts.parquet", out / "demonstrations.parquet"
    write_parquet(prompts, [{k: v for k, v in row.items() if k != "response"} for row in rows(0, 4096)])
    write_parquet(demonstrations, rows(1, 20_000))
    make_tiny_model("qwen3_moe", out / "random", 0, norm_spread=0.0)
    run(
        "recipes/quickstart_sft.yaml", f"model.path={out}/random", f"data.train_files=[{demonstrations}]", f"runs_dir={out}",
        "name=sft", f"rollout.max_response_length={LONGEST}", "train.steps=300", "data.prompts_per_step=64",
    )  # fmt: skip
    return out / "sft" / "hf", prompts


def measure(
    out: Path, model: Path, prompts: Path, schedule: str, number: int, steps: int, engines: int, pace: Pace | None
) -> dict[str, float]:
    """Train with a schedule and return its figures over the measured steps. `pace`: seconds of each operation, if given."""
    name = f"{schedule}-{number}"
    run(
        "recipes/quickstart.yaml", f"model.path={model}", f"data.train_files=[{prompts}]", "data.eval_files=[]",
        f"runs_dir={out}", f"name={name}", *SCHEDULES[schedule], f"rollout.engines={engines}", "cluster.trainers=1",
        "megatron.expert_parallel=1", f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_response_length={LONGEST}", f"rollout.engine_args.max_num_seqs={16 if pace is None else 64}",
        f"observe.samples_per_step={PROMPTS * SAMPLES}",
        "reward.function=tests.support.scorers:letters", "algorithm.dynamic_sampling.enabled=false",
        "algorithm.overlong.penalty_buffer=0", "actor.optimizer.lr=1e-9", "actor.optimizer.warmup_steps=0",
        "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.greedy=false", f"train.steps={steps}",
        "train.save_at_end=false", "train.export_at_end=false", f"train.seed={number}",
        pace=pace,
    )  # fmt: skip
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    lines = lines[FIRST:-LAST]
    seconds = sum(line["timing_s/step"] for line in lines)
    waits = sum(line.get("timing_s/gen", 0.0) + line.get("timing_s/drain", 0.0) for line in lines)
    return {
        "tokens per second": sum(line["perf/total_num_tokens"] for line in lines) / seconds,
        "step": seconds / len(lines),
        "waits": waits / seconds,
        "length": statistics.mean(line["response_length/mean"] for line in lines),
        "longest": max(line["response_length/max"] for line in lines),
        "staleness": statistics.mean(line["rollout/staleness_mean"] for line in lines),
        "spans": statistics.mean(line.get("rollout/spans_mean", 1.0) for line in lines),
    }


def table(figures: dict[str, list[dict[str, float]]]) -> str:
    """Format the figures, with ratios to the synchronous run of the same round."""
    out = [
        "| schedule | tokens/s against sync: mean (rounds) | step, s | trainers wait | mean length, longest | staleness | spans |",
        "|---|---|---|---|---|---|---|",
    ]
    for schedule, runs in figures.items():
        ratios = [
            run["tokens per second"] / sync["tokens per second"]
            for run, sync in zip(runs, figures["sync"], strict=True)
        ]

        def mean(key: str, runs: list[dict[str, float]] = runs) -> float:
            return statistics.mean(run[key] for run in runs)

        rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        out.append(
            f"| {schedule} | {statistics.mean(ratios):.2f} ({rounds}) | {mean('step'):.2f} | {mean('waits'):.0%} | "
            f"{mean('length'):.1f}, {mean('longest'):.0f} | {mean('staleness'):.2f} | {mean('spans'):.2f} |"
        )
    return "\n".join(out)


def comparison(measured: dict[str, list[dict[str, float]]], predicted: dict[str, list[dict[str, float]]]) -> str:
    """Format measured and predicted ratios to the synchronous run, over all rounds, and their difference."""
    out = [
        "| schedule | measured | predicted | difference | step, s: measured, predicted | staleness: measured, predicted |",
        "|---|---|---|---|---|---|",
    ]

    def mean(runs: list[dict[str, float]], key: str) -> float:
        return statistics.mean(run[key] for run in runs)

    def ratio(figures: dict[str, list[dict[str, float]]], schedule: str) -> float:
        pairs = zip(figures[schedule], figures["sync"], strict=True)
        return statistics.mean(run["tokens per second"] / sync["tokens per second"] for run, sync in pairs)

    for schedule, runs in measured.items():
        seen, expected, simulated = ratio(measured, schedule), ratio(predicted, schedule), predicted[schedule]
        steps = f"{mean(runs, 'step'):.2f}, {mean(simulated, 'step'):.2f}"
        staleness = f"{mean(runs, 'staleness'):.2f}, {mean(simulated, 'staleness'):.2f}"
        out.append(f"| {schedule} | {seen:.2f} | {expected:.2f} | {expected / seen - 1:+.0%} | {steps} | {staleness} |")
    return "\n".join(out)


def schedules_of(text: str | None) -> list[str]:
    """Return the schedules of --only, `sync` first. Raises SystemExit for other names."""
    chosen = list(SCHEDULES) if text is None else ["sync", *(name for name in text.split(",") if name != "sync")]
    unknown = [name for name in chosen if name not in SCHEDULES]
    if unknown:
        raise SystemExit(f"--only: unknown schedules {', '.join(unknown)}; expected {', '.join(SCHEDULES)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--paced", action="store_true", help="operations take the seconds of PACE; compare with the simulation"
    )
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --paced")
    parser.add_argument("--steps", type=int, help="default: 30, or 20 with --paced")
    parser.add_argument("--only", metavar="NAMES", help="schedules, separated by commas; sync is always run")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "asynchrony")
    options = parser.parse_args()
    schedules, pace = schedules_of(options.only), PACE if options.paced else None
    steps = options.steps or (30 if pace is None else 20)
    out = options.out.absolute()
    out.mkdir(parents=True)
    model, prompts = make_model(out)
    figures: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in schedules}
    predicted: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in schedules}
    for number in range(options.rounds or (3 if pace is None else 1)):
        for schedule, runs in figures.items():
            runs.append(measure(out, model, prompts, schedule, number, steps, options.engines, pace))
            print(f"round {number + 1}, {schedule}: {runs[-1]}", file=sys.stderr, flush=True)
            if pace is not None:
                predicted[schedule].append(predict(out / f"{schedule}-{number}", pace, FIRST, LAST))
                print(f"  predicted: {predicted[schedule][-1]}", file=sys.stderr, flush=True)
    print(table(figures))
    if pace is not None:
        print(f"\n{comparison(figures, predicted)}")


if __name__ == "__main__":
    main()
