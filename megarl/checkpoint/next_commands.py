"""Commands that a run names: in its last lines, which list its files, and in notices of steps that the user may repeat."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.folder import checkpoint_step, list_checkpoints, resume_hint
from megarl.checkpoint.journal import newest_step
from megarl.errors import InputError, RecipeError, SpoiledWeights, add_note, command_name
from megarl.observe.advice.advise import advice_lines
from megarl.observe.restarts import restarts_by_command
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sessions import time_lines
from megarl.observe.stdout import output
from megarl.recipe.schema import Recipe, TrainConfig


@dataclass(frozen=True)
class Repetition:
    """Advice on how to repeat a step of this start of a run.

    has_tape: the start writes a tape, so that a bundle can contain the step. checkpoint: where the start began; None: at step 1.
    """

    run: RunDirectory
    has_tape: bool
    checkpoint: Path | None

    def advice(self, step: int) -> str:
        """Return a sentence with the command that repeats `step`, or with the reason why there is none."""
        if self.has_tape and (self.checkpoint is None or self.checkpoint.is_dir()):
            return f"To repeat the step, pack it when it has ended: {command_name()} replay {shlex.quote(str(shown(self.run.path)))} --bundle step.tar --step {step}"
        if self.has_tape:
            return (
                f"The step cannot be repeated: a bundle of it begins at {self.checkpoint}, which was deleted. With train.keep_every, "
                "checkpoints stay"
            )
        older = [path for path in list_checkpoints(self.run.checkpoints) if checkpoint_step(path) < step]
        resume = shown(older[-1]) if older else self.checkpoint or "never"
        words = ["train", str(shown(self.run.recipe)), "name=repeated", f"train.resume={resume}"]
        return f"To repeat the step: {command_name()} {shlex.join(words)}"


def print_end(recipe: Recipe, run: RunDirectory) -> None:
    """Print `after_training`, unless the console prints events for programs: its last event names the files."""
    if recipe.observe.console != "json":
        print(*after_training(recipe, run), sep="\n", file=output(), flush=True)


def after_training(recipe: Recipe, run: RunDirectory) -> list[str]:
    """Return the last lines of a finished run: paths (run, report, checkpoint, model), time and faults, advice, commands.

    Lists only existing files. Paths outside the current folder are absolute.
    """
    checkpoints = list_checkpoints(run.checkpoints)
    model = run.path / "hf"
    paths = [("run", run.path)]
    paths += [("report", run.report)] * run.report.exists()
    paths += [("checkpoint", checkpoints[-1])] if checkpoints else []
    paths += [("model", model)] * model.is_dir()
    lines = [f"{recipe.name}: finished", *(f"  {name:<11} {shown(path)}" for name, path in paths)]
    summary = json.loads(run.summary.read_text()) if run.summary.exists() else None
    if summary is not None:
        lines += [f"  {name:<11} {text}" for name, text in time_lines(summary)]
    if not checkpoints and not model.is_dir():
        lines.append(
            "  no weights were saved: train.save_at_end and train.export_at_end are off, train.save_every was never due"
        )
    commands = _commands(recipe, run, model if model.is_dir() else None, bool(checkpoints))
    lines += advice_lines(summary["advice"]) if summary is not None else []
    return [*lines, *(["next:"] if commands else []), *(f"  {command_name()} {command}" for command in commands)]


def _commands(recipe: Recipe, run: RunDirectory, model: Path | None, checkpoints: bool) -> list[str]:
    exported = model
    commands: list[list[str | Path]] = []
    if model is None and checkpoints:
        exported = Path("models") / recipe.name
        commands.append(["export", shown(run.path), "--out", exported])
    if exported is not None and recipe.train.source == "rollout" and recipe.data.eval_files:
        merged = ["lora.path=null"] if recipe.lora.path else []
        commands.append(["eval", shown(run.recipe), f"model.path={shown(exported)}", *merged])
    if not run.report.exists():
        commands.append(["report", shown(run.path)])
    return [shlex.join(map(str, words)) for words in commands]


def after_interruption(recipe: Recipe, run: RunDirectory) -> list[str]:
    """Return the last lines of a run that Ctrl-C or SIGTERM ended: its folder and how to resume."""
    return [
        f"{recipe.name}: stopped; its files are in {shown(run.path)}",
        *(advice_lines(json.loads(run.summary.read_text())["advice"]) if run.summary.exists() else []),
        _resume_line(recipe.train, run.checkpoints, run.journal),
    ]


def _resume_line(train: TrainConfig, checkpoints: Path, journal: Path) -> str:
    """Return how to resume: from a checkpoint, or from the journal after it."""
    step, key = newest_step(journal), "" if train.resume == "auto" else " with train.resume=auto"
    saved = list_checkpoints(checkpoints)
    if not train.journal or step is None or (saved and checkpoint_step(saved[-1]) >= step):
        return resume_hint(checkpoints, train.resume, train.save_every)
    start = f"the checkpoint of step {checkpoint_step(saved[-1])}" if saved else "where the run began"
    return (
        f"The journal has the steps up to {step} (train.journal). Go on after it: the same command{key}, which trains the steps since "
        f"{start} again without sampling."
    )


def shown(path: Path) -> Path:
    """Return `path` relative to the current folder if it is inside it, else unchanged."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


@contextlib.contextmanager
def naming_checkpoint(recipe: Recipe, directory: RunDirectory) -> Iterator[None]:
    """Add a note on the last checkpoint and how to resume to an error of the run; print it after Ctrl-C and SIGTERM.

    SpoiledWeights gets no note: its message names the checkpoint, and the last one may be the wrong one.
    """
    try:
        yield
    except (RecipeError, InputError):  # the run did not start, so it cannot be resumed
        raise
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C or SIGTERM: the command line does not show their notes
            print("", *after_interruption(recipe, directory), sep="\n", file=sys.stderr, flush=True)
            raise
        if restarts_by_command() or isinstance(error, SpoiledWeights):
            raise
        try:
            note = _resume_line(recipe.train, directory.checkpoints.absolute(), directory.journal)
        except OSError as problem:  # e.g. the disk failed
            note = f"The checkpoints could not be listed: {problem}"
        add_note(error, note)
        raise
