"""The recipe's section `observe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.platform.tracing import TraceOptions
from megarl.recipe.key import key

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe


@dataclass
class ObserveConfig:
    """What a person sees. metrics.jsonl is always written."""

    console: Literal["auto", "live", "plain"] = key(
        "auto",
        "A live display, or lines for a log: parts of the start, steps (docs/metrics.md). auto: live on a terminal.",
    )
    tensorboard: bool = key(True, "Write TensorBoard events.")
    trackers: list[str] = key([], "Any of wandb, swanlab, mlflow; each must be installed and logged in.")
    project: str = key("megarl", "Project name in these trackers.")
    samples_per_step: int = key(
        32, "Samples written to samples/ a step, in whole groups spread over the batch.", at_least=0
    )
    report: bool = key(True, "Write report.html at the end.")
    profile_steps: list[int] = key(
        [],
        "Steps that are traced with the profiler of the device, to the run's `profile/`: what it costs and how to read it is in docs/profiling.md.",
    )
    profile_ranks: list[int] = key(
        [0], "Trainers, by rank, that are traced in `observe.profile_steps`, from their shard to their update."
    )
    profile_engines: list[int] = key(
        [],
        "Engines of the policy, by number, that are traced in `observe.profile_steps` while they sample for the step.",
    )
    profile_discrete: bool = key(
        False,
        "A trace for each phase of a trainer (old_log_prob, reference, update_actor) instead of one for the step.",
    )
    profile_contents: list[str] = key(
        [],
        "What a trace holds, of device (kernels), cpu (operators), memory, shapes, modules, stack. Empty: device, cpu and shapes, as far as the device has them. Each of the others makes traces larger and steps slower.",
    )
    profile_level: str = key(
        "",
        "How much the device's profiler records, where it has levels: level0 (its default), level1, level2, level_none.",
    )
    profile_metrics: str = key(
        "",
        "Counters of the device's cores, where its profiler has them, at level1 and level2: such as PipeUtilization. Empty: none.",
    )
    profile_mstx: bool = key(
        False,
        "Record the marks that libraries set in the device's streams (communication, data loading), where its profiler can.",
    )
    profile_export: str = key("", "Format of the tables, where the profiler has several: text (its default) or db.")
    profile_analysis: bool = key(
        True, "false: write raw data alone, to be analysed later, where the profiler can: the step ends sooner."
    )


def trace_options(observe: ObserveConfig) -> TraceOptions:
    """Return the settings of `Platform.profiler`."""
    return TraceOptions(
        contents=tuple(observe.profile_contents),
        level=observe.profile_level,
        metrics=observe.profile_metrics,
        export=observe.profile_export,
        marks=observe.profile_mstx,
        analysis=observe.profile_analysis,
    )


def traces_notice(recipe: Recipe) -> str | None:
    """Return a notice that engines' traces overlap if engines sample several steps at a time; else None."""
    ahead = recipe.rollout.max_staleness
    if not recipe.observe.profile_engines or ahead == 0:
        return None
    return (
        f"observe.profile_engines with rollout.max_staleness={ahead}: engines sample up to {ahead + 1} steps at a time, so the "
        "trace called step_N begins after the first samples of step N, and holds requests of later steps too; "
        "rollout.max_staleness=0 in a run of some steps gives traces of one step each"
    )
