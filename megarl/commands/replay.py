"""`megarl replay`: repeat a recorded run by its tape, and compare the metrics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os import environ
from pathlib import Path
from typing import Any

from megarl.commands.child import run_child
from megarl.errors import as_input_error
from megarl.observe.metrics import read_metrics, without_times
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.load import load_recipe
from megarl.rollout.tape import ReplayPlan, history, segments_of

_SHOWN = 5  # differing metrics in the output


def replay(run: Path, name: str | None, overrides: Sequence[str]) -> int:
    """Repeat `run` in a new directory beside it, one `megarl train` for each of its starts, and compare the metrics.

    name: of the new run; None: that of `run` with `-replay`. Returns the exit status: 1 if a metric differs, and that of a
    training that fails.
    """
    with as_input_error():
        recorded = RunDirectory(run.absolute())
        plans = history(segments_of(recorded.tape))
        if not plans:
            raise ValueError(
                f"{run} has no tape (tape/controller.jsonl). Runs with rollout.at_update refresh or keep write one; other "
                "runs repeat without a tape: start them again"
            )
        first = recorded.tape / f"recipe-{plans[0].segment.number}.yaml"
        recipe = load_recipe(first, overrides)
    target = RunDirectory(Path(recipe.runs_dir) / (name or f"{recipe.name}-replay"))
    for number, plan in enumerate(plans):
        steps = f"steps {plan.segment.after + 1} to {plan.last_step or recipe.train.steps}"
        print(f"replay of {run}, start {number + 1} of {len(plans)}: {steps}", flush=True)
        status = run_child(_command(recorded, target, plan, is_first=number == 0, overrides=overrides), environ)
        if status:
            return status
    return _compare(recorded, target)


def _command(
    recorded: RunDirectory, target: RunDirectory, plan: ReplayPlan, *, is_first: bool, overrides: Sequence[str]
) -> list[str]:
    settings = [f"name={target.path.name}", f"runs_dir={target.path.parent}", f"train.replay={recorded.path}"]
    if not is_first:
        settings.append("train.resume=auto")
    recipe = recorded.tape / f"recipe-{plan.segment.number}.yaml"
    return [sys.executable, "-m", "megarl", "train", str(recipe), *overrides, *settings]


def _compare(recorded: RunDirectory, target: RunDirectory) -> int:
    """Print whether the metrics of the replayed steps are equal, and return the exit status."""
    before, after = read_metrics(recorded.metrics), read_metrics(target.metrics)
    steps = {line["step"] for line in after}
    differing = differences(without_times([line for line in before if line["step"] in steps]), without_times(after))
    if not differing:
        print(f"{len(after)} lines of metrics are equal to the last bit (times, rates and memory left out)")
        return 0
    print(f"{len(differing)} metrics differ:")
    for text in differing[:_SHOWN]:
        print(f"  {text}")
    return 1


def differences(recorded: Sequence[dict[str, Any]], repeated: Sequence[dict[str, Any]]) -> list[str]:
    """Return the metrics that differ, in order of the steps, with both values."""
    by_step = {line["step"]: line for line in recorded}
    texts = []
    for line in repeated:
        expected = by_step.get(line["step"], {})
        for name in sorted({*line, *expected}):
            value, other = line.get(name), expected.get(name)
            if value != other and not (value != value and other != other):  # NaN repeats, too
                texts.append(f"step {line['step']}: {name} is {value!r}, in the recorded run {other!r}")
    return texts
