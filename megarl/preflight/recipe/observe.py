"""Checks of the section `observe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of

if TYPE_CHECKING:
    from megarl.platform.device_kind import DeviceKind
    from megarl.recipe.schema import Recipe


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
