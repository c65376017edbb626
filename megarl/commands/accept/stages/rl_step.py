"""Stage 6: `megarl train` on tiny models, colocated and one step off; then the recipe's twin."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.commands.accept.context import Context
from megarl.commands.accept.families import write_family
from megarl.data.prepare import word_problems
from megarl.observe.metrics import read_metrics
from megarl.rehearsal.scorer import NAME as SCORER

STEPS = 3
GAP = 0.02  # nats, mean, of the first step of weights that are the engine's
_LINES = 3  # last lines of a failed run's output in its cause


def run(context: Context) -> None:
    """Three steps of each kind, with a checkpoint and a resume; then the recipe's twin on these devices."""
    model = write_family("dense" if context.tiny else "moe", context.shared)
    context.doing("writing data")
    data = context.shared / "data"
    if not (data / "train.parquet").exists():
        word_problems.prepare(data, 0, train=64, test=16, sft=16, preferences=16)
    colocated = recipe_of(context, model, data, "colocated")
    _train(context, "colocated", write(context, colocated), STEPS)
    _train(
        context,
        "colocated, resumed",
        write(context, colocated),
        STEPS + 1,
        ["train.resume=auto", f"train.steps={STEPS + 1}"],
    )
    if context.tiny or context.settings.devices >= 2:
        apart = recipe_of(context, model, data, "disaggregated")
        _train(context, "one step off", write(context, apart), STEPS)
    else:
        context.not_run("one step off", "needs two devices")
    _twin(context)


def recipe_of(context: Context, model: Path, data: Path, placement: str) -> dict[str, Any]:
    """A recipe of a tiny model, as YAML has it. A coin decides rewards, so that random answers teach something."""
    apart = placement == "disaggregated"
    trainers = 1 if context.tiny else max(1, min(context.settings.devices // (2 if apart else 1), 8))
    return {
        "name": placement,
        "runs_dir": str(context.folder / "runs"),
        "model": {"path": str(model), "dtype": "float32" if context.tiny else "bfloat16"},
        "cluster": {
            "device": context.device,
            "trainers": trainers,
            "placement": placement,
            "threads": 1 if context.tiny else 4,
        },
        "data": {
            "train_files": [str(data / "train.parquet")],
            "prompts_per_step": 8,
            "max_prompt_length": 64,
            "chat_template": False,
        },
        "rollout": {
            "engines": 1 if context.tiny or apart else trainers,
            "samples_per_prompt": 4,
            "max_response_length": 24,
            "max_staleness": int(apart),
            "engine_args": {"max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 26 if context.tiny else 1 << 30},
        },
        "reward": {"function": SCORER},
        "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "kl_coef": 0.0},
        "actor": {"optimizer": {"lr": 1e-3, "warmup_steps": 0}},
        "train": {"steps": STEPS, "save_every": STEPS},
        "observe": {"console": "plain"},
    }


def write(context: Context, recipe: dict[str, Any]) -> Path:
    path = context.folder / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def _train(
    context: Context, name: str, recipe: Path, steps: int, overrides: Sequence[str] = (), *, compares: bool = True
) -> None:
    """Run `megarl train` as a user does, and look at every line of its metrics."""
    context.doing(f"{name}: megarl train {recipe.name}")
    log = context.folder / f"{name.replace(',', '').replace(' ', '-')}.log"
    environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    began = time.monotonic()
    with log.open("w") as stream:
        status = subprocess.run(
            [sys.executable, "-m", "megarl", "train", str(recipe), *overrides],
            env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=False,
        ).returncode  # fmt: skip
    context.equal(f"{name}: exit status", status, 0, cause=last_lines(log))
    if status:
        return
    context.figure(f"{name}: seconds", time.monotonic() - began, unit="s")
    folder = Path(yaml.safe_load(recipe.read_text())["runs_dir"]) / yaml.safe_load(recipe.read_text())["name"]
    judge_metrics(
        context,
        name,
        [line for line in read_metrics(folder / "metrics.jsonl") if line["step"]],
        steps,
        compares=compares,
    )


def judge_metrics(
    context: Context, name: str, lines: list[dict[str, Any]], steps: int, *, compares: bool = True
) -> None:
    """Every step is there, every number is finite, no update was skipped, engine and trainer agree.

    compares: whether some step must hold log-probs of fresh samples to the trainer's.
    """
    context.equal(f"{name}: steps", str([line["step"] for line in lines]), str(list(range(1, steps + 1))))
    wrong = [
        f"step {line['step']}: {key} is {value}"
        for line in lines
        for key, value in line.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    context.equal(f"{name}: metrics that are no finite numbers", len(wrong), 0, cause="; ".join(wrong[:3]))
    skipped = sum(line.get("actor/skipped_updates", 0.0) for line in lines)
    context.equal(f"{name}: skipped updates", skipped, 0.0, cause="a gradient was not finite")
    fresh = [
        line["rollout/logprob_gap_mean"]
        for line in lines
        if "rollout/logprob_gap_mean" in line and not line.get("rollout/staleness_max")
    ]
    if fresh:
        context.at_most(
            f"{name}: log-probs of engine against trainer", max(fresh), limit=GAP, unit="nats",
            cause="engines sample from other weights, or compute another model",
        )  # fmt: skip
    elif compares:
        cause = "metrics.jsonl has no rollout/logprob_gap_mean of fresh samples"
        context.equal(f"{name}: log-probs of engine against trainer", None, "a number in some step", cause=cause)
    else:
        context.not_run(f"{name}: log-probs of engine against trainer", "no step of this recipe compares them")
    moved = max((line.get("actor/grad_norm", 0.0) for line in lines), default=0.0)
    context.at_least(f"{name}: gradient norm", moved, limit=1e-8, cause="nothing is learnt: every gradient is zero")
    peak = max((line.get("perf/max_memory_allocated_gb", 0.0) for line in lines), default=0.0)
    context.figure(f"{name}: peak memory of a trainer", peak, unit="GiB")


def _twin(context: Context) -> None:
    """The recipe with its settings and layout, as far as these devices go, and its model shrunk."""
    if not context.settings.recipe:
        context.not_run("the recipe's twin", "no recipe was named")
        return
    from megarl.rehearsal.twin import make_twin

    context.doing("making the recipe's twin")
    folder = context.folder / "twin"
    folder.mkdir(exist_ok=True)
    processes = None if context.tiny else context.settings.devices
    twin = make_twin(Path(context.settings.recipe), context.settings.overrides, folder, processes=processes)
    steps = twin.recipe.train.steps
    _train(
        context,
        "the recipe's twin",
        twin.path,
        steps,
        [] if context.tiny else [f"cluster.device={context.device}"],
        compares=False,
    )


def last_lines(log: Path) -> str:
    """The end of a run's output, which says what it failed of."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:])[-400:]
