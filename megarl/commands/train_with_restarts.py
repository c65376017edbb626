"""Train in a child process, and start it again from the newest checkpoint after a process of the run has died."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megarl.checkpoint.folder import checkpoint_step, list_checkpoints
from megarl.checkpoint.journal import newest_step
from megarl.cluster import under_torchrun
from megarl.cluster.failures import ProcessInfo, WorkerFailed, exit_cause
from megarl.cluster.keeper import Keepers
from megarl.cluster.orphan_reaper import marked, sweep
from megarl.cluster.sigstop_watch import LocalWatch
from megarl.commands.child import STOPPED, run_child
from megarl.observe.alerts import Alerts
from megarl.observe.restarts import AFTER, REPORT, End, reporting_end, restarts_by_command
from megarl.observe.run_dir import RunDirectory
from megarl.observe.stdout import KEPT_FOR, kept_stdout
from megarl.preflight.load import load_recipe
from megarl.recipe import Recipe
from megarl.recipe.schema import TrainConfig

_MARK = "MEGARL_RUN"  # in the environment of every process of the run on this machine
_EXIT_SECONDS = 30.0  # time for the processes of an ended run to end by themselves
_FIRST_DELAY, _LONGEST_DELAY = 10.0, 300.0  # seconds before the second restart in a row; at most
TRAIN = (sys.executable, "-m", "megarl", "train")


def run_train_command(path: Path, overrides: Sequence[str], *, debug: bool) -> int:
    """Train here, or in a child process that is restarted if the recipe wants that. Returns the exit status."""
    with reporting_end(), contextlib.ExitStack() as stdout:
        stdout.enter_context(kept_stdout())  # the user's modules that the recipe names may print when they are imported
        recipe = load_recipe(path, list(overrides))
        if recipe.observe.console not in KEPT_FOR:
            stdout.close()
        if not restarts_itself(recipe.train):
            from megarl.train import train  # the command that restarts a run does not need it

            train(recipe)
            return 0
    return train_with_restarts(recipe, path, overrides, debug=debug)


def restarts_itself(train: TrainConfig) -> bool:
    """Return whether `megarl train` runs a recipe with these settings in a child process that it starts again."""
    return train.restarts > 0 and train.replay is None and not under_torchrun() and not restarts_by_command()


def train_with_restarts(
    recipe: Recipe, path: Path, overrides: Sequence[str], *, debug: bool, train: Sequence[str] = TRAIN
) -> int:
    """Train to the end and return the exit status of the last start.

    `path`, `overrides`: the command line of `recipe`. `train`: the command that trains. Stops the child if this process is
    interrupted (see `run_child`). Sends the alerts of restarts and of the failure that ends the run; the child sends the others.
    """
    with Alerts(recipe.observe.alerts, recipe.name, _print) as alerts, Keepers(recipe) as keepers:
        return _train_to_the_end(recipe, path, overrides, alerts, keepers, debug=debug, train=train)


def _train_to_the_end(
    recipe: Recipe,
    path: Path,
    overrides: Sequence[str],
    alerts: Alerts,
    keepers: Keepers,
    *,
    debug: bool,
    train: Sequence[str],
) -> int:
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    journal = directory.journal if recipe.train.journal else None

    def step_of_resume() -> int | None:
        return resumable_step(directory.checkpoints, journal)

    earlier = saved_steps(directory.checkpoints, journal)
    failures = Failures(recipe.train.restarts, step_of_resume(), "step in the journal" if journal else "checkpoint")
    command = [*train, str(path), *(["--debug"] if debug else [])]
    resume, after = [*overrides], ""
    while True:
        end = _run([*command, *resume], after, keepers.environment())
        cause = cause_of_restart(end, restarted=bool(after))
        if cause is None:
            if end.report is not None and end.status not in STOPPED:
                alerts.send("failure", end.report.cause, step_of_resume() or 0)
            return end.status
        delay = failures.note(cause, step_of_resume())
        step = failures.newest_step
        if delay is None:
            _print(failures.last_words)
            alerts.send("failure", failures.last_words, step or 0)
            return end.status if end.status > 0 else 1
        if end.report is None:  # the child could not print it
            _print(cause)
        resume = resuming(overrides, recipe.train.resume, saved_steps(directory.checkpoints, journal) - earlier)
        place = "without a checkpoint" if step is None else f"from step {step}"
        if "train.resume=auto" not in resume:
            place = f"from {recipe.train.resume}"
        wait = f" in {delay:.0f} s" if delay else ""
        count = f"failure {failures.in_a_row} of at most {failures.limit} without a new {failures.progress}"
        _print(f"the run is started again {place}{wait} ({count})")
        alerts.send("restart", cause, step or 0)
        time.sleep(delay)
        after = cause.splitlines()[0]


@dataclass(frozen=True)
class Ended:
    """A start that has ended: its exit status (negative: the number of a signal), its report, if it wrote one, and why it was killed by
    `StopWatch`; "" if it was not."""

    status: int
    report: End | None
    stopped: str = ""


class StopWatch:
    """Notices a controller that stays stopped (SIGSTOP, Ctrl-Z). `cause`: why it is lost; "" if it is not."""

    def __init__(self) -> None:
        self.cause = ""
        self._watch: LocalWatch | None = None

    def __call__(self, pid: int) -> bool:
        """Look at the controller's process. Returns whether it is lost."""
        self._watch = self._watch or LocalWatch([ProcessInfo("the controller", pid=pid)], "the run")
        try:
            self._watch.check()
        except WorkerFailed as error:
            self.cause = error.failure.cause
        return bool(self.cause)


def cause_of_restart(end: Ended, *, restarted: bool) -> str | None:
    """Return why the run has to be started again; None if a restart cannot help: success, a stop, or another error.

    `restarted`: this start was a restart. It may find fewer devices, or a cluster that is not back yet, which is an error of the
    user at the first start.
    """
    if end.status == 0 or end.status in STOPPED:
        return None
    if end.report is None:
        return f"the controller: {end.stopped or exit_cause(end.status)}"
    is_late = end.status == 2 and restarted
    return end.report.cause if end.report.process_failed or is_late else None


class Failures:
    """Counts failures without progress in between. `limit`: `train.restarts`; `newest_step`: of the checkpoints and the journal;
    `progress`: a newer one, for messages."""

    def __init__(self, limit: int, newest_step: int | None, progress: str = "checkpoint") -> None:
        self.limit, self.newest_step, self.in_a_row, self.progress = limit, newest_step, 0, progress
        self.last_words = ""  # after too many failures

    def note(self, cause: str, newest_step: int | None) -> float | None:
        """Count a failure. Returns the seconds to wait before the restart; None if there were too many."""
        before, self.newest_step = self.newest_step, newest_step
        progressed = newest_step is not None and (before is None or newest_step > before)
        self.in_a_row = 1 if progressed else self.in_a_row + 1
        if self.in_a_row > self.limit:
            self.last_words = (
                f"{self.in_a_row} failures without a new {self.progress} in between (train.restarts={self.limit}): the run ends. "
                f"Last cause: {cause.splitlines()[0]}"
            )
            return None
        return 0.0 if self.in_a_row == 1 else min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (self.in_a_row - 2))


def _run(command: Sequence[str], after: str, environment: Mapping[str, str]) -> Ended:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="megarl-restarts-") as folder:
        report = Path(folder) / "end.json"
        environ = {**environment, REPORT: str(report), AFTER: after, _MARK: mark}
        watch = StopWatch()
        # No limit for its end: the child may save a checkpoint first.
        status = run_child(command, environ, stop_seconds=None, is_lost=watch)
        _wait_for_processes(lambda: marked(mark, _MARK))
        sweep(mark, variable=_MARK)
        return Ended(status, End.read(report), watch.cause)


def _wait_for_processes(alive: Callable[[], Sequence[int]]) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)


def resuming(overrides: Sequence[str], resume: str, new: Iterable[SavedStep]) -> list[str]:
    """Return the overrides of a restart. `resume`: `train.resume`; a path is kept until the run has gone beyond this checkpoint.

    new: the run's checkpoints, and states in its journal, that were not there when the command began.
    """
    if resume not in ("never", "auto") and all(saved.step <= checkpoint_step(Path(resume)) for saved in new):
        return [*overrides]
    return [*(each for each in overrides if not each.startswith("train.resume=")), "train.resume=auto"]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class SavedStep(NamedTuple):
    """A checkpoint, or a state in the journal. written: in nanoseconds; a later one of the same step is another."""

    path: Path
    step: int
    written: int


def saved_steps(checkpoints: Path, journal: Path | None) -> set[SavedStep]:
    """Return the run's checkpoints, and the states in its journal if it has one."""
    paths = [*list_checkpoints(checkpoints), *(list_checkpoints(journal) if journal is not None else [])]
    return {SavedStep(path, checkpoint_step(path), path.stat().st_mtime_ns) for path in paths}


def resumable_step(checkpoints: Path, journal: Path | None) -> int | None:
    """Return the newest step of the run's checkpoints, and of its journal if it has one; None if there is none."""
    steps = [checkpoint_step(path) for path in list_checkpoints(checkpoints)[-1:]]
    journalled = newest_step(journal) if journal is not None else None
    return max([*steps, *([] if journalled is None else [journalled])], default=None)
