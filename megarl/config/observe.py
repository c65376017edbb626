"""The recipe's section `observe`, and what is refused of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.config.errors import RecipeError
from megarl.config.key import key

if TYPE_CHECKING:
    from megarl.config.schema import Recipe


@dataclass
class ObserveConfig:
    """What a person sees. metrics.jsonl is always written."""

    console: Literal["auto", "live", "plain"] = key(
        "auto", "A live display, or a line for each part of the start and each step. auto: live on a terminal."
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
        "Steps of which a trainer's operations and kernels are traced, from its shard to its update, with the profiler of its device, to the run's `profile/`. Such a step is slower.",
    )
    profile_ranks: list[int] = key([0], "Trainers, by rank, that are traced in `observe.profile_steps`.")


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
    ):
        if wrong := [number for number in numbers if not first <= number <= last]:
            there_are = f"{what} go from {first} to {last}, and {wrong[0]} is none of them"
            raise RecipeError(f"observe.{name}", there_are, "name others", value=list(numbers))
    if observe.profile_steps and not observe.profile_ranks:
        raise RecipeError("observe.profile_ranks", "nothing would be traced", "name a rank", value=[])
