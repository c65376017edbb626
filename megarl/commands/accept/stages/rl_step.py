"""Stage 6, rl step: `megarl train` with tiny models, then with the recipe reduced to few layers or to a tiny copy."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.cut import CannotCut, Cut, make_cut
from megarl.commands.accept.tiny_families import write_family
from megarl.commands.data import word_problems
from megarl.commands.plan.count.types import DeviceUses
from megarl.commands.rehearse.scorer import NAME as SCORER
from megarl.observe.metrics import read_metrics
from megarl.platform.kinds import kind_of

STEPS, TINY_STEPS = 3, 2
TRACED = 2  # the step with a trace for the bundle; the first one compiles and warms up
RATIO = 0.02  # largest difference of the first update's mean importance ratio from 1
PLANNED = 1.1  # limit of a trainer's peak memory, relative to the plan
GAP = 0.02  # nats, mean, for samples of the current weights
TENSORS = ("weights", "gradients", "optimizer", "activations", "logits", "Adam's step", "weight-sync buffers")
_LINES = 3  # last lines of a failed run's output in its cause


def run(context: StageContext) -> None:
    """Train a tiny model colocated and one step off, with a checkpoint and a resume; then train the recipe.

    Each run has three steps. On a CPU each has two, and the run that resumes is the one that samples one step ahead.
    """
    model = write_family("dense" if context.tiny else "moe", context.shared)
    context.doing("writing data")
    data = context.shared / "data"
    if not (data / "train.parquet").exists():
        word_problems.prepare(data, 0, train=64, test=16, sft=16, preferences=16)
    steps = TINY_STEPS if context.tiny else STEPS
    colocated = write(context, recipe_of(context, model, data, "colocated"))
    _train(context, "colocated", colocated, steps, first=True)
    resume = ["train.resume=auto"]
    if context.tiny:
        ahead = ["cluster.placement=disaggregated", "rollout.max_staleness=1", f"train.steps={2 * steps}"]
        _train(context, "resumed, one step off", colocated, 2 * steps, [*resume, *ahead])
    else:
        _train(context, "colocated, resumed", colocated, steps + 1, [*resume, f"train.steps={steps + 1}"])
        if context.settings.devices >= 2:
            apart = recipe_of(context, model, data, "disaggregated")
            _train(context, "one step off", write(context, apart), steps, first=True)
        else:
            context.not_run("one step off", "needs two devices")
    _of_recipe(context)


def recipe_of(context: StageContext, model: Path, data: Path, placement: str) -> dict[str, Any]:
    """Return a recipe for a tiny model, as a YAML mapping. A coin as scorer gives random answers different rewards."""
    apart, steps = placement == "disaggregated", TINY_STEPS if context.tiny else STEPS
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
        "train": {"steps": steps, "save_every": steps, "save_at_end": False},
        "observe": {"console": "plain", "report": False, "tensorboard": False, **traces(context)},
    }


def traces(context: StageContext) -> dict[str, Any]:
    """Return the keys of `observe` that trace one step of trainer 0, and on devices of engine 0 with its counters."""
    tracing = kind_of(context.device).tracing
    keys: dict[str, Any] = {"profile_steps": [TRACED], "profile_engines": [] if context.tiny else [0]}
    if "level1" in tracing.levels:
        keys["profile_level"] = "level1"
    return keys


def write(context: StageContext, recipe: dict[str, Any]) -> Path:
    path = context.folder / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def _train(
    context: StageContext,
    name: str,
    recipe: Path,
    steps: int,
    overrides: Sequence[str] = (),
    *,
    compares: bool = True,
    first: bool = False,
) -> list[dict[str, Any]]:
    """Run `megarl train`, check its metrics, and return them, or [] if it failed. `compares`, `first`: `check_metrics`."""
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
        return []
    context.figure(f"{name}: seconds", time.monotonic() - began, unit="s")
    written = yaml.safe_load(recipe.read_text())
    folder = Path(written["runs_dir"]) / written["name"]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"]]
    check_metrics(context, name, lines, steps, compares=compares, first=first)
    return lines


def check_metrics(
    context: StageContext,
    name: str,
    lines: list[dict[str, Any]],
    steps: int,
    *,
    compares: bool = True,
    first: bool = False,
) -> None:
    """Check that all steps ran, all numbers are finite, no update was skipped, and engine and trainer agree.

    compares: some step must compare the log-probs of fresh samples with the trainer's. first: step 1 has a single
    update, so its importance ratios are 1 apart from rounding.
    """
    context.equal(f"{name}: steps", str([line["step"] for line in lines]), str(list(range(1, steps + 1))))
    wrong = [
        f"step {line['step']}: {key} is {value}"
        for line in lines
        for key, value in line.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    context.equal(f"{name}: metrics that are not finite", len(wrong), 0, cause="; ".join(wrong[:3]))
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
            cause="engines have other weights, or compute another model",
        )  # fmt: skip
    elif compares:
        cause = "metrics.jsonl has no rollout/logprob_gap_mean of fresh samples"
        context.equal(f"{name}: log-probs of engine against trainer", None, "a number in some step", cause=cause)
    else:
        context.not_run(f"{name}: log-probs of engine against trainer", "no step of this recipe compares them")
    if first:
        _ratios(context, name, lines[0] if lines else {})
    moved = max((line.get("actor/grad_norm", 0.0) for line in lines), default=0.0)
    context.at_least(f"{name}: gradient norm", moved, limit=1e-8, cause="nothing is learnt: every gradient is zero")
    context.figure(f"{name}: peak memory of a trainer", peak_of(lines), unit="GiB")


def _ratios(context: StageContext, name: str, line: dict[str, Any]) -> None:
    """Check two mean importance ratios of step 1: update to old log-probs, and old log-probs to the engine's."""
    missing = math.nan  # fails every limit
    context.at_most(
        f"{name}: importance ratio of the first update, less 1", abs(line.get("actor/ratio", missing) - 1), limit=RATIO,
        cause="the update and the pass before it compute different log-probs with the same weights",
    )  # fmt: skip
    behaviour = behaviour_ratio(line)
    context.at_most(
        f"{name}: ratio of trainer to engine before the first update, less 1", abs(behaviour - 1), limit=RATIO,
        cause=f"on average, a token's probability in the trainer is {behaviour:.4g} times that in the engine",
    )  # fmt: skip


def behaviour_ratio(line: dict[str, Any]) -> float:
    """Return the mean of p(trainer) / p(engine) = exp(d) over tokens: 1 + k3 - k1.

    The metrics are k1 = mean(-d) and k3 = mean(exp(d) - d - 1).
    """
    k1, k3 = line.get("rollout/logprob_gap_k1", math.nan), line.get("rollout/logprob_gap_k3", math.nan)
    return float(1 + k3 - k1)


def _of_recipe(context: StageContext) -> None:
    """Train the recipe: on devices with full widths and few layers, on a CPU as a tiny copy."""
    if not context.settings.recipe:
        context.not_run("the recipe's steps", "no recipe was named")
        return
    if context.tiny:
        cause = "on a CPU the peak includes the process's libraries, and a plan only counts tensors"
        context.not_run("the recipe: peak memory of a trainer against the plan", cause)
        _tiny_copy(context)
        return
    folder = context.folder / "cut"
    folder.mkdir(exist_ok=True)
    context.doing("writing the recipe's cut model")
    try:
        cut = make_cut(
            Path(context.settings.recipe), context.settings.overrides, folder, context.device, context.settings.devices
        )
    except CannotCut as error:
        context.not_run("the recipe with few layers", str(error))
        _tiny_copy(context)
        return
    try:
        context.figure("the recipe with few layers", cut.layout)
        if not cut.recipe.train.save_every:
            context.not_run("the recipe with few layers: checkpoint", f"{folder} has too little room for two")
        lines = _train(context, "the recipe with few layers", cut.path, cut.recipe.train.steps, compares=False)
        _against_the_plan(context, cut, lines)
    finally:
        for name in ("model", "runs/cut/checkpoints"):  # large files
            shutil.rmtree(folder / name, ignore_errors=True)


def _against_the_plan(context: StageContext, cut: Cut, lines: list[dict[str, Any]]) -> None:
    """Compare the peak of torch's allocator in a trainer with the tensors that `megarl plan` counts."""
    name = "the recipe with few layers: peak memory of a trainer"
    peak = peak_of(lines)
    if not peak:
        context.not_run(f"{name}, of the plan's", "no step was trained")
        return
    context.doing("planning the recipe with few layers")
    from megarl.commands.plan.build import make_plan

    try:
        plan = make_plan(cut.recipe, {"rollout": cut.config, "critic": cut.config}, None, advise=False)
    except ValueError as error:
        context.not_run(f"{name}, of the plan's", str(error))
        return
    phase, planned = planned_peak(plan.places)
    context.figure(f"{name}, planned", planned, unit=f"GiB, in {phase}")
    cause = f"{peak:.3g} GiB were allocated, and the plan has {planned:.3g} in {phase}: megarl plan counts too little"
    context.at_most(f"{name}, of the plan's", peak / max(planned, 1e-9), limit=PLANNED, cause=cause)


def peak_of(lines: list[dict[str, Any]]) -> float:
    """Return the largest peak of a trainer's allocator in GiB."""
    return max((line.get("perf/max_memory_allocated_gb", 0.0) for line in lines), default=0.0)


def planned_peak(places: Sequence[DeviceUses]) -> tuple[str, float]:
    """Return the phase in which a trainer's tensors need the most memory, and their GiB.

    Memory of engines and libraries is excluded, since the trainer's allocator does not count it.
    """
    sums = {
        (use.phase, place.name): sum(use.parts.get(part, 0) for part in TENSORS) / 2**30
        for place in places
        for use in place.uses
    }
    phase, place = max(sums, key=lambda key: sums[key])
    return f"{phase} of {place}", sums[phase, place]


def _tiny_copy(context: StageContext) -> None:
    """Train a tiny copy of the recipe, with a layout for these devices."""
    from megarl.commands.rehearse.tiny_copy import make_tiny_copy

    context.doing("making a tiny copy of the recipe")
    folder = context.folder / "tiny_copy"
    folder.mkdir(exist_ok=True)
    processes = None if context.tiny else context.settings.devices
    tiny = make_tiny_copy(Path(context.settings.recipe), context.settings.overrides, folder, processes=processes)
    on_device = [] if context.tiny else [f"cluster.device={context.device}"]
    _train(context, "tiny copy of the recipe", tiny.path, tiny.recipe.train.steps, on_device, compares=False)


def last_lines(log: Path) -> str:
    """Return the end of a run's output, which has the cause of a failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:])[-400:]
