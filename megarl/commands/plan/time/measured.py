"""Measured step times of a run, read from its directory, for comparison with an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from megarl.batching.flops import shape_flops
from megarl.commands.plan.time.calibration import FORMER_PHASES
from megarl.commands.plan.time.lengths import Lengths
from megarl.hf.shape import ModelShape
from megarl.observe.json_lines import read_lines
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings, settings_of

FIRST = 2  # steps at the begin of a session that are left out: they compile, allocate and connect
_TIMING = "timing_s/"
_SAME = 0.25  # tolerated relative difference of FLOPs: only mean lengths are known

# Sections and keys that do not change the time of a step.
_INDIFFERENT = (
    "name", "runs_dir", "evaluation.", "observe.", "judge.", "sandbox.", "reward.", "model.tokenizer", "data.train_files",
    "data.mix", "data.eval_files", "data.shuffle", "data.curriculum", "data.workers", "data.cache", "data.overlong",
    "data.prompt_suffix", "data.chat_template", "rollout.timeout", "rollout.start_timeout", "rollout.temperature",
    "rollout.top_", "algorithm.clip", "algorithm.dual_clip", "algorithm.correction", "algorithm.overlong",
    "actor.optimizer.", "critic.optimizer.", "critic.warmup_steps", "critic.value_clip", "megatron.moe_", "train.steps", "train.epochs", "lora.path",
    "train.seed", "train.save", "train.export", "train.keep", "train.verify", "train.stop", "train.resume",
    "cluster.timeout", "cluster.ray_address", "cluster.device_peak", "weight_sync.timeout",
    "weight_sync.silence",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a run."""

    run: Path
    steps: int
    seconds: dict[str, float]  # of phases, by the names of timing_s/...
    step: float
    lengths: Lengths
    tried: float  # prompts sampled per prompt that was trained on

    @property
    def rest(self) -> float:
        """Seconds of a step outside its phases."""
        return self.step - sum(self.seconds.values())


def read_run(path: Path, recipe: Recipe, shape: ModelShape) -> Measured:
    """Read a run. Raises ValueError for a directory without a run, another recipe or model, and a run that is too short."""
    run_dir = RunDirectory(path)
    if not run_dir.metrics.is_file() or not run_dir.recipe.is_file():
        raise ValueError(f"{path} is not a training run: it lacks metrics.jsonl or recipe.resolved.yaml.")
    _check_recipe(run_dir, recipe)
    lines = [line for line in read_lines(run_dir.metrics)[0] if f"{_TIMING}update_actor" in line]
    lines = lines[FIRST:]
    if not lines:
        raise ValueError(f"{path} has no step past the first {FIRST}, which are slower than others: train for more.")
    _check_model(path, lines, recipe, shape)
    names = {name for line in lines for name in line if name.startswith(_TIMING)}
    seconds = {name.removeprefix(_TIMING): median(line.get(name, 0.0) for line in lines) for name in names}
    step = seconds.pop("step", sum(seconds.values()))
    top_level = {FORMER_PHASES.get(name, name): value for name, value in seconds.items() if "/" not in name}
    return Measured(path, len(lines), top_level, step, _lengths(lines), _tried(lines, recipe.data.prompts_per_step))


def _check_recipe(run_dir: RunDirectory, recipe: Recipe) -> None:
    theirs, ours = flat_settings(run_dir.recipe.read_text(encoding="utf-8")), settings_of(recipe)
    keys = [key for key in sorted({*theirs, *ours}) if not key.startswith(_INDIFFERENT)]
    different = [key for key in keys if theirs.get(key) != ours.get(key)]
    if different:
        differences = "; ".join(
            f"{key} is {theirs.get(key)!r} in the run and {ours.get(key)!r} here" for key in different[:5]
        )
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise ValueError(
            f"{run_dir.path} is a run of another recipe: {differences}{more}. Give the recipe that it ran, {run_dir.recipe}, or "
            "a run of this one."
        )


def _check_model(path: Path, lines: list[dict[str, float]], recipe: Recipe, shape: ModelShape) -> None:
    """Compare the FLOPs that the run counted with the FLOPs of this model."""
    speed = "perf/tflops_per_device/actor"
    devices = 1e12 * recipe.cluster.trainers
    counted = [line[speed] * devices * line[f"{_TIMING}update_actor"] for line in lines if speed in line]
    if not counted:
        return
    lengths = _lengths(lines)
    tokens = fmean(line["perf/total_num_tokens"] for line in lines)
    flops = shape_flops(shape)
    samples = lengths.samples(64)
    expected = float(flops.of_update(samples, frozen=recipe.lora.rank > 0).sum()) * tokens / float(samples.sum())
    ratio = fmean(counted) / expected
    if abs(ratio - 1) > _SAME:
        raise ValueError(
            f"{path} is a run of another model: its updates had {fmean(counted):.3g} FLOPs per step, this model would have "
            f"{expected:.3g}. Give the run's model with --model or model.path."
        )


def _lengths(lines: list[dict[str, float]]) -> Lengths:
    def mean(name: str) -> float:
        return fmean(line[name] for line in lines)

    prompt, response = mean("prompt_length/mean"), mean("response_length/mean")
    origin = f"mean response {response:.4g} tokens and prompt {prompt:.4g}, as the run measured"
    return Lengths.around(prompt, response, mean("response_length/max"), origin)


def _tried(lines: list[dict[str, float]], prompts_per_step: int) -> float:
    name, unused = "rollout/prompts_tried", "rollout/groups_unused"
    tried = [line[name] + line.get(unused, 0.0) for line in lines if name in line]
    return fmean(tried) / prompts_per_step if tried else 1.0
