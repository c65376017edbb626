"""The recipe's section `observe`, and what is refused of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of
from megarl.platform.tracing import TraceOptions
from megarl.recipe.key import key

if TYPE_CHECKING:
    from megarl.platform.device_kind import DeviceKind
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
    """The recipe's settings in the words of `Platform.profiler`."""
    return TraceOptions(
        contents=tuple(observe.profile_contents),
        level=observe.profile_level,
        metrics=observe.profile_metrics,
        export=observe.profile_export,
        marks=observe.profile_mstx,
        analysis=observe.profile_analysis,
    )


def check_observe(recipe: Recipe) -> None:
    """Raise RecipeError for trackers that nobody knows, and for steps and ranks that there are not."""
    observe = recipe.observe
    for tracker in observe.trackers:
        if tracker not in ("wandb", "swanlab", "mlflow"):
            raise RecipeError(
                "observe.trackers",
                f"there is no tracker '{tracker}'",
                "choose from wandb, swanlab, mlflow",
                value=list(observe.trackers),
            )
    for name, numbers, first, last, what in (
        ("profile_steps", observe.profile_steps, 1, recipe.train.steps, "steps (train.steps)"),
        ("profile_ranks", observe.profile_ranks, 0, recipe.cluster.trainers - 1, "ranks (cluster.trainers)"),
        ("profile_engines", observe.profile_engines, 0, recipe.rollout.engines - 1, "engines (rollout.engines)"),
    ):
        if wrong := [number for number in numbers if not first <= number <= last]:
            there_are = f"{what} go from {first} to {last}, and {wrong[0]} is none of them"
            raise RecipeError(f"observe.{name}", there_are, "name others", value=list(numbers))
    if observe.profile_steps and not (observe.profile_ranks or observe.profile_engines):
        raise RecipeError(
            "observe.profile_ranks", "nothing would be traced", "name a rank, or an engine in profile_engines", value=[]
        )
    if observe.profile_engines:
        _check_engines(recipe)
    if recipe.cluster.device != "auto":
        check_traces(recipe, kind_of(recipe.cluster.device))


def _check_engines(recipe: Recipe) -> None:
    """Raise RecipeError where no engine of the policy could be traced."""
    engines = list(recipe.observe.profile_engines)
    if recipe.train.source != "rollout":
        why, what = f"train.source={recipe.train.source} has no engines", "leave it out"
    elif recipe.rollout.engine != "vllm":
        why, what = f"only engines of rollout.engine=vllm are traced, not {recipe.rollout.engine}", "leave it out"
    elif not recipe.observe.profile_steps:
        why, what = "no step is traced", "name steps in observe.profile_steps"
    else:
        return
    raise RecipeError("observe.profile_engines", why, what, value=engines)


def traces_notice(recipe: Recipe) -> str | None:
    """A sentence on the content of engines' traces where engines sample several steps at a time; None elsewhere."""
    ahead = recipe.rollout.max_staleness
    if not recipe.observe.profile_engines or ahead == 0:
        return None
    return (
        f"observe.profile_engines with rollout.max_staleness={ahead}: engines sample up to {ahead + 1} steps at a time, so the "
        "trace called step_N begins after the first samples of step N, and holds requests of later steps too; "
        "rollout.max_staleness=0 in a run of some steps gives traces of one step each"
    )


def check_traces(recipe: Recipe, kind: DeviceKind) -> None:
    """Raise RecipeError for what the profiler of the recipe's device does not know. With cluster.device=auto it is called once
    the device is known."""
    observe, can = recipe.observe, kind.tracing
    for name, value, choices in (
        ("profile_contents", observe.profile_contents, can.contents),
        ("profile_level", [observe.profile_level] if observe.profile_level else [], can.levels),
        ("profile_metrics", [observe.profile_metrics] if observe.profile_metrics else [], can.metrics),
        ("profile_export", [observe.profile_export] if observe.profile_export else [], can.exports),
    ):
        if wrong := [one for one in value if one not in choices]:
            has = (
                f"the profiler of {kind.plural} has {', '.join(choices)}"
                if choices
                else f"that of {kind.plural} has none"
            )
            raise RecipeError(
                f"observe.{name}",
                f"'{wrong[0]}' is not among them: {has}",
                "choose from these, or leave it out",
                value=value,
            )
    if observe.profile_contents and not {"cpu", "device"} & set(observe.profile_contents):
        raise RecipeError(
            "observe.profile_contents",
            "the others are recorded with operators or kernels, and neither is asked for",
            "add cpu or device",
            value=list(observe.profile_contents),
        )
    settings = {
        "profile_mstx": (observe.profile_mstx, can.marks),
        "profile_analysis": (not observe.profile_analysis, can.analysis),
    }
    for name, (wanted, possible) in settings.items():
        if wanted and not possible:
            raise RecipeError(
                f"observe.{name}",
                f"the profiler of {kind.plural} has no such setting",
                "leave it out",
                value=getattr(observe, name),
            )
    if observe.profile_metrics and observe.profile_level not in can.levels_of_metrics:
        raise RecipeError(
            "observe.profile_metrics",
            f"counters are recorded at {' and '.join(can.levels_of_metrics)} alone",
            f"set observe.profile_level={can.levels_of_metrics[0]}",
            value=observe.profile_metrics,
        )
    if observe.profile_level and observe.profile_level == can.level_of_marks and not observe.profile_mstx:
        raise RecipeError(
            "observe.profile_level",
            "it records marks alone",
            "set observe.profile_mstx=true",
            value=observe.profile_level,
        )
