"""`megarl replay`: repeat a recorded run by its tape, and compare the metrics."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.checkpoint.folder import checkpoint_name
from megarl.checkpoint.next_commands import shown
from megarl.checkpoint.run_checkpoints import is_due
from megarl.commands.child import run_child
from megarl.errors import as_input_error, command_name, spans_of
from megarl.observe.metrics import read_metrics, without_times
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.replay import no_plan, recipe_file
from megarl.recipe.load import read_recipe, setting_of
from megarl.recipe.schema import TrainConfig
from megarl.rollout.tape import ReplayPlan, TapeSegment, from_journal, history, other_format, segments_of

_SHOWN = 5  # differing metrics in the output
_FIXED = ("name", "runs_dir", "train.replay", "train.resume")  # settings of this command


@dataclass(frozen=True)
class Start:
    """A start of the recorded run, and the last step that its replay takes. `resume`: its `train.resume`.

    not_repeated: the steps of each later start, if this start saved a checkpoint at SIGTERM, where the replay ends.
    """

    plan: ReplayPlan
    recipe: Path
    last_step: int
    resume: str
    not_repeated: tuple[range, ...] = ()

    @property
    def steps(self) -> str:
        after = self.plan.segment.after
        if self.last_step == after:
            return f"the metrics of step {after}"
        return spans_text(range(after + 1, self.last_step + 1))


def replay(run: Path, name: str | None, overrides: Sequence[str]) -> int:
    """Repeat `run` in a new directory, one `megarl train` for each of its starts, and compare the metrics.

    name: see `target_of`. Returns the exit status: 1 if a metric differs or a step of the repeated starts is missing; the
    training's status if a training fails.
    """
    with as_input_error():
        recorded = RunDirectory(os.path.abspath(run))
        target = target_of(recorded, name, "replay")
        check_overrides(overrides)
        _check_target(target)
        starts = starts_of(recorded, overrides)
    for line in _not_repeated_lines(recorded, starts[-1]):
        print(line)
    return run_starts(recorded, target, starts, overrides) or compare(recorded, target, starts)


def target_of(recorded: RunDirectory, name: str | None, suffix: str) -> RunDirectory:
    """Return the directory of the new run: next to `recorded`, or at `name` if it contains a slash, from the working directory on.

    name: None: the name of `recorded` with a hyphen and `suffix`.
    """
    if name and os.sep in name:
        return RunDirectory(os.path.abspath(name))
    return RunDirectory(recorded.path.parent / (name or f"{recorded.path.name}-{suffix}"))


def run_starts(
    recorded: RunDirectory,
    target: RunDirectory,
    starts: Sequence[Start],
    overrides: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> int:
    """Run a training for each of `starts`, until one fails; returns its exit status, else 0.

    environ, folder: environment variables and working directory of the trainings; None: this one.
    """
    for number, start in enumerate(starts, start=1):
        print(f"replay of {shown(recorded.path)}, start {number} of {len(starts)}: {start.steps}", flush=True)
        texts = {"name": target.path.name, "runs_dir": target.path.parent}
        texts |= {"train.replay": recorded.path, "train.resume": start.resume}
        settings = [setting_of(name, str(text)) for name, text in texts.items()]
        command = [sys.executable, "-m", "megarl", "train", str(start.recipe), *overrides, *settings]
        status = run_child(command, environ, folder)
        if status:
            return status
    return 0


def check_overrides(overrides: Sequence[str], command: str = "replay", fixed: Sequence[str] = _FIXED) -> None:
    """Raise ValueError if an override sets one of the settings `fixed`, which the command sets."""
    wrong = [override for override in overrides if override.partition("=")[0] in fixed]
    if wrong:
        bundle = " (--out for a bundle)" if command == "replay" else ""
        raise ValueError(
            f"megarl {command} sets {', '.join(fixed)} itself, got {wrong[0]}: use --name{bundle}, which may be a path"
        )


def _check_target(target: RunDirectory) -> None:
    if target.has_results():
        raise ValueError(
            f"{target.path} already holds a run, perhaps of an earlier replay: remove it, or give this replay another name "
            "(--name)"
        )


def starts_of(recorded: RunDirectory, overrides: Sequence[str]) -> list[Start]:
    """Return the starts that repeat a recorded run, up to a checkpoint that SIGTERM caused: a replay does not save there.

    Raises ValueError if the run cannot be repeated.
    """
    plans = history(segments_of(recorded.tape))
    if not plans:
        remedy = (
            "Runs with rollout.at_update finish, refresh or keep, or with rollout.admission continuous, write a tape; runs with "
            "drain and wave repeat without one: start them again"
        )
        raise ValueError(f"{no_plan(recorded)}. {remedy}")
    if (problem := other_format(plans)) is not None:
        raise ValueError(f"{recorded.path}: {problem}. Replay it with that version of megarl")
    if (problem := from_journal(plans)) is not None:
        raise ValueError(f"{recorded.path}: {problem}")
    starts: list[Start] = []
    saving: TrainConfig | None = None  # of the start before
    for index, plan in enumerate(plans):
        after = plan.segment.after
        if saving is not None and not (is_due(after, saving.save_every) or after == saving.steps):
            starts[-1] = replace(starts[-1], not_repeated=tuple(steps_of(recorded, later) for later in plans[index:]))
            break
        file = recipe_file(recorded.tape, plan.segment.number)
        recipe = read_recipe(file, overrides).recipe  # the training checks it
        last_step = recipe.train.steps if plan.last_step is None else plan.last_step
        checkpoint = None if starts else first_checkpoint(recorded, plan.segment, recipe.train.resume)
        resume = "auto" if starts else "never" if checkpoint is None else str(checkpoint)
        saving = recipe.train
        starts.append(Start(plan, file, last_step, resume))
    return starts


def steps_of(recorded: RunDirectory, plan: ReplayPlan) -> range:
    """Return the steps that the plan repeats with their metrics."""
    last_step = plan.last_step
    if last_step is None:
        last_step = read_recipe(recipe_file(recorded.tape, plan.segment.number)).recipe.train.steps
    return range(plan.segment.after + 1, last_step + plan.logs_last)


def _not_repeated_lines(recorded: RunDirectory, last: Start) -> Iterator[str]:
    """Yield a notice about starts that the replay leaves out, and a command for each of them."""
    steps = [step for span in last.not_repeated for step in span]
    if not last.not_repeated:
        return
    omitted = spans_text(steps) if steps else f"the start after step {last.last_step}"
    yield (
        f"the replay ends after step {last.last_step} and does not repeat {omitted}: SIGTERM caused the checkpoint of step "
        f"{last.last_step}, and a replay does not save there"
    )
    for span in filter(None, last.not_repeated):
        text = spans_text(span)
        run = shlex.quote(str(shown(recorded.path)))
        yield f"  {text}: {command_name()} replay {run} --bundle step.tar --step {span[-1]}"


def first_checkpoint(recorded: RunDirectory, segment: TapeSegment, resume: str) -> Path | None:
    """Return the checkpoint that a segment begins after; None if it begins at step 1. `resume`: its recorded `train.resume`.

    Raises ValueError if the checkpoint is missing, or if a replay cannot begin there.
    """
    after = segment.after
    if after == 0:
        return None
    if segment.unlogged:
        raise ValueError(
            f"the tape of {recorded.path} begins with a start that wrote the metrics of step {after}, after the step's "
            "checkpoint, and a replay cannot begin there"
        )
    local = recorded.checkpoints / checkpoint_name(after)
    for checkpoint in (Path(resume), local):
        if checkpoint.name == local.name and checkpoint.is_dir():
            return checkpoint.absolute()
    raise ValueError(
        f"the tape of {recorded.path} begins after step {after}, and the checkpoint of this step is missing: copy it to {local}. "
        "If the run has deleted it (train.keep_checkpoints), the steps of this start cannot be repeated; train.keep_every keeps checkpoints"
    )


def _repeated_steps(starts: Sequence[Start]) -> range:
    """Return the range of steps in the metrics of the replay. Step 0 is the evaluation at the start, if the run has one."""
    after, last = starts[0].plan.segment.after, starts[-1]
    return range(after + 1 if after else 0, last.last_step + last.plan.logs_last)


def compare(recorded: RunDirectory, target: RunDirectory, starts: Sequence[Start]) -> int:
    """Print whether the metrics of the repeated steps are equal, and which lines were not compared. Returns the exit status."""
    steps = _repeated_steps(starts)
    before = {int(line["step"]): line for line in read_metrics(recorded.metrics)}
    after = {int(line["step"]): line for line in read_metrics(target.metrics)}
    common = [step for step in after if step in before]
    left_out = [step for step in before if step not in steps and step not in after]
    stopped = [step for step in left_out if starts[-1].not_repeated and step >= steps.stop]
    if stopped:
        print(f"not repeated, since SIGTERM caused the checkpoint before them: {spans_text(stopped)}")
    if uncovered := [step for step in left_out if step not in stopped]:
        print(f"not repeated, since the tape does not contain them: {spans_text(uncovered)}")
    if lost := [step for step in after if step not in before]:
        print(f"not compared, since the recorded run has no metrics of them: {spans_text(lost)}")
    missing = [step for step in before if step in steps and step not in after]
    if missing:
        print(f"the replay has no metrics of {spans_text(missing)}")
    differing = differences(*(without_times([lines[step] for step in common]) for lines in (before, after)))
    if differing:
        print(f"{len(differing)} metrics differ:")
        for text in differing[:_SHOWN]:
            print(f"  {text}")
    elif common:
        print(f"{len(common)} lines of metrics are bitwise equal (times, rates and memory left out)")
    else:
        print("no line of metrics could be compared")
    return 1 if differing or missing or not common else 0


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


def spans_text(steps: Sequence[int]) -> str:
    """Return increasing steps as text: `steps 1 to 20, 45`."""
    text = ", ".join(" to ".join(map(str, span)) for span in spans_of(steps))
    return f"{'step' if len(steps) == 1 else 'steps'} {text}"
