"""Train the quickstart's model with each rule of `rollout.at_update` and three seeds; print accuracies as a table.

    bash launch/quickstart.sh                      # makes the initial model and the data
    python -m benchmarks.learning_at_update [--seeds 3] [--out runs/learning_at_update]

A run takes two minutes on two CPU cores. Two engines sample up to two versions ahead, with importance weights per token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RULES = ("drain", "finish", "refresh", "keep")
STEPS = 45
LAST = 20  # number of last steps in the mean lag
SETTINGS = [
    "cluster.placement=disaggregated", "rollout.engines=2", "cluster.trainers=1", "megatron.expert_parallel=1",
    "rollout.max_staleness=2", "algorithm.correction.weights=token", f"train.steps={STEPS}", "train.save_at_end=false",
    "train.export_at_end=false", "evaluation.greedy=false",
]  # fmt: skip


def learn(out: Path, rule: str, seed: int) -> tuple[float, float, float]:
    """Train. Returns the accuracy before and after, and the mean lag of a sample. Raises CalledProcessError."""
    name = f"{rule}-{seed}"
    overrides = [f"runs_dir={out}", f"name={name}", f"train.seed={seed}", f"rollout.at_update={rule}", *SETTINGS]
    command = [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    lag = sum(line["rollout/staleness_mean"] for line in lines[-LAST:]) / LAST
    return accuracies[0], accuracies[-1], lag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning_at_update")
    options = parser.parse_args()
    results = {rule: [learn(options.out.absolute(), rule, seed) for seed in range(options.seeds)] for rule in RULES}
    print("| rule | accuracy before | after, by seed | mean | lag, mean |\n|---|---|---|---|---|")
    for rule, runs in results.items():
        before, after, lags = zip(*runs, strict=True)
        by_seed = ", ".join(f"{value:.3f}" for value in after)
        mean, lag = sum(after) / len(after), sum(lags) / len(lags)
        print(f"| `{rule}` | {min(before):.3f} | {by_seed} | {mean:.3f} | {lag:.2f} |")


if __name__ == "__main__":
    main()
