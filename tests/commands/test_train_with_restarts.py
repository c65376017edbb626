"""Restarts of a failed run (`train.restarts`): their causes, limits, delays, overrides and notices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.cluster.failures import CallFailed, Failure, ProcessInfo, WorkerFailed
from megarl.commands import train_with_restarts as module
from megarl.commands.train_with_restarts import (
    Ended,
    Failures,
    cause_of_restart,
    restarts_itself,
    resuming,
    saved_steps,
    train_with_restarts,
)
from megarl.errors import InputError
from megarl.observe.restarts import AFTER, REPORT, End, reporting_end, restart_notices
from megarl.preflight.recipe.train import restart_errors
from megarl.recipe import Recipe
from megarl.recipe.observe import AlertsConfig
from megarl.weight_sync.session import WeightSyncError
from tests.support.training_runs import lives
from tests.support.webhook_receiver import TOKEN, Receiver

DIED = End("WorkerFailed: trainer rank 1 died: killed\nits output", process_failed=True)
WRONG = End("OSError: disk full", process_failed=False)
# Stands for `megarl train`: notes its arguments, then does the next line of `plan`: checkpoints to write, report, exit.
TRAIN = f"""
import json, os, pathlib, signal, subprocess, sys
folder = pathlib.Path(sys.argv[1])
starts = folder / "starts.jsonl"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    print(json.dumps([sys.argv[2:], os.environ["{AFTER}"]]), file=file)
plan = json.loads((folder / "plan.json").read_text())[number]
for step in plan.get("steps", []):
    (folder / "runs" / "run" / "checkpoints" / f"step_{{step:06d}}").mkdir(parents=True)
if "end" in plan:
    pathlib.Path(os.environ["{REPORT}"]).write_text(json.dumps(plan["end"]))
if plan.get("leaves"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    (folder / "left").write_text(str(child.pid))
if plan["exit"] < 0:
    os.kill(os.getpid(), -plan["exit"])
sys.exit(plan["exit"])
"""
FAILS = {"exit": 1, "end": {"cause": DIED.cause, "process_failed": True}}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.0)
    monkeypatch.setattr(module, "_EXIT_SECONDS", 0.5)


def train(
    folder: Path,
    *plan: dict[str, object],
    restarts: int = 2,
    resume: str = "never",
    alerts: AlertsConfig | None = None,
) -> tuple[int, list[list[str]], list[str]]:
    """Return the exit status, and the overrides and the cause of the restart that each start received."""
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "train.py").write_text(TRAIN)
    recipe = Recipe()
    recipe.runs_dir, recipe.train.restarts, recipe.train.resume = str(folder / "runs"), restarts, resume
    recipe.name, recipe.observe.alerts = "run", alerts or AlertsConfig()
    command = (sys.executable, str(folder / "train.py"), str(folder))
    overrides = ["name=run", *([f"train.resume={resume}"] if resume != "never" else [])]
    status = train_with_restarts(recipe, Path("recipe.yaml"), overrides, debug=False, train=command)
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    return status, [arguments[1:] for arguments, _ in starts], [after for _, after in starts]


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    status, overrides, causes = train(tmp_path, {**FAILS, "steps": [1, 2]}, {"exit": -signal.SIGKILL}, {"exit": 0})
    assert status == 0
    assert overrides == [["name=run"], *[["name=run", "train.resume=auto"]] * 2]
    assert causes[:2] == ["", "WorkerFailed: trainer rank 1 died: killed"], "one line"
    assert "the controller: its process was killed by signal 9 (SIGKILL)" in causes[2]


def test_failures_without_progress_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second failure is the first without a checkpoint since the last: it and one more are allowed."""
    status, overrides, _ = train(tmp_path, FAILS, {**FAILS, "steps": [3]}, FAILS, FAILS, {"exit": 0})
    assert status == 1 and len(overrides) == 4
    words = capsys.readouterr().err
    assert "again without a checkpoint (failure 1 of at most 2" in words
    assert "from step 3 (failure 1 of at most 2" in words
    assert (
        "3 failures without a new checkpoint in between (train.restarts=2)" in words and "trainer rank 1 died" in words
    )


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr("megarl.observe.alerts._BETWEEN", 0.0)
    with Receiver() as server:
        monkeypatch.setenv("TEST_ALERT_URL", server.url)
        yield server


def test_restarts_and_the_last_failure_are_reported_for_a_child_that_cannot(
    tmp_path: Path, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = {**FAILS, "steps": [4]}, {"exit": -signal.SIGKILL}
    status, _, _ = train(tmp_path, *plan, alerts=AlertsConfig(url="TEST_ALERT_URL"), restarts=1)
    assert status == 1
    restart, failure = receiver.messages
    assert (restart["event"], restart["run"], restart["step"]) == ("restart", "run", 4)
    assert restart["cause"] == "WorkerFailed: trainer rank 1 died: killed"
    assert (failure["event"], failure["step"]) == ("failure", 4)
    assert "2 failures without a new checkpoint in between" in failure["cause"]
    assert "killed by signal 9 (SIGKILL)" in failure["cause"]
    assert TOKEN not in "".join(capfd.readouterr())


def test_errors_are_reported_and_other_ends_left_to_the_child(tmp_path: Path, receiver: Receiver) -> None:
    """The child writes a report for every exception, SIGTERM's included."""
    ends = {0: None, 1: WRONG.cause, 2: "InputError: no data", 130: "KeyboardInterrupt: ", 143: "Terminated: "}
    for status, cause in ends.items():
        folder = tmp_path / str(status)
        folder.mkdir()
        report = {} if cause is None else {"end": {"cause": cause, "process_failed": False}}
        alerts = AlertsConfig(url="TEST_ALERT_URL")
        assert train(folder, {"exit": status, **report}, alerts=alerts)[0] == status
    assert [message["cause"] for message in receiver.messages] == ["OSError: disk full", "InputError: no data"]


def test_a_dead_webhook_does_not_hinder_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Receiver() as server:
        monkeypatch.setenv("TEST_ALERT_URL", server.url)
    status, _, causes = train(tmp_path, FAILS, FAILS, {"exit": 0}, alerts=AlertsConfig(url="TEST_ALERT_URL"))
    assert status == 0 and len(causes) == 3
    words = capfd.readouterr().err
    assert "no connection: ConnectError" in words and words.count("observe.alerts") == 2 and TOKEN not in words
    assert "1 alert of observe.alerts was not sent" in words


@pytest.mark.parametrize("status", [2, 130, 143])
def test_other_ends_are_final(tmp_path: Path, status: int) -> None:
    end = {"cause": "RecipeError: no", "process_failed": False}
    assert train(tmp_path, {"exit": status, "end": end}, {"exit": 0})[0] == status


def test_an_error_of_the_controller_is_final(tmp_path: Path) -> None:
    assert train(tmp_path, {"exit": 1, "end": {"cause": "OSError", "process_failed": False}})[0] == 1


def test_a_child_that_is_told_to_stop_has_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit could end the run while it writes a checkpoint."""
    limits = []

    def run_child(*_: object, stop_seconds: float | None, **more: object) -> int:
        limits.append(stop_seconds)
        (tmp_path / "starts.jsonl").write_text("")
        return 143

    monkeypatch.setattr(module, "run_child", run_child)
    assert train(tmp_path)[0] == 143 and limits == [None]


def test_a_stopped_controller_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for watcher in ("megarl.commands.child", "megarl.cluster.sigstop_watch"):
        monkeypatch.setattr(f"{watcher}.LOOK_SECONDS", 0.1)
    status, _, causes = train(tmp_path, {"exit": -signal.SIGSTOP}, {"exit": 0})
    assert status == 0 and re.search(
        r"the controller: its process has been stopped for 1 s in the run, as by SIGSTOP", causes[1]
    )
    assert "Check what stops processes" in capsys.readouterr().err


def test_processes_of_an_ended_start_are_gone_before_the_next(tmp_path: Path) -> None:
    """They would still hold devices and ports."""
    assert train(tmp_path, {**FAILS, "leaves": True}, {"exit": 0})[0] == 0
    left = int((tmp_path / "left").read_text())
    assert not psutil.pid_exists(left) or not lives(psutil.Process(left))


def test_a_cluster_with_too_few_devices_after_a_failure_is_tried_again() -> None:
    too_few = Ended(2, End("InputError: too few devices", process_failed=False))
    assert cause_of_restart(too_few, restarted=False) is None, "an error of the user"
    assert cause_of_restart(too_few, restarted=True) == "InputError: too few devices"
    assert (
        cause_of_restart(Ended(1, DIED), restarted=False) and cause_of_restart(Ended(1, WRONG), restarted=True) is None
    )


def test_waits_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY", 10.0)
    failures = Failures(8, 4)
    assert [failures.note("cause", 4) for _ in range(9)] == [0, 10, 20, 40, 80, 160, 300, 300, None]
    failures = Failures(2, 4)
    assert [failures.note("cause", step) for step in (4, 4, 5, 4, 3)] == [0, 10, 0, 10, None], (
        "an older checkpoint does not count"
    )


def test_a_path_to_resume_from_stays_until_the_run_is_beyond_it(tmp_path: Path) -> None:
    """Checkpoints from before the command do not count: the user has named an older one, or one of another run."""
    path, own = "old/step_000003", tmp_path / "checkpoints"
    for step in (2, 4):
        (own / f"step_{step:06d}").mkdir(parents=True)
    earlier, overrides = saved_steps(own, None), ["a=1", f"train.resume={path}"]
    assert resuming(overrides, path, saved_steps(own, None) - earlier) == overrides
    (own / "step_000004").rename(tmp_path / "abandoned")
    assert resuming(overrides, path, saved_steps(own, None) - earlier) == overrides
    (own / "step_000004").mkdir()
    assert resuming(overrides, path, saved_steps(own, None) - earlier) == ["a=1", "train.resume=auto"]
    assert resuming(["a=1"], "never", []) == ["a=1", "train.resume=auto"], "metrics may exist by then"


def failed(cause: str, died: bool = False) -> Failure:
    return Failure(ProcessInfo("trainer rank 0"), cause, died=died)


@pytest.mark.parametrize(
    ("error", "process_failed"),
    [
        (WorkerFailed(failed("its process was killed", died=True)), True),
        (CallFailed(failed("EngineDead: core has died")), True),
        (WeightSyncError("silent"), True),
        (OSError("No space left on device"), False),
        (InputError("no data"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_the_child_reports_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, process_failed: bool
) -> None:
    monkeypatch.setenv(REPORT, str(tmp_path / "end.json"))
    with pytest.raises(type(error)), reporting_end():
        raise error
    end = End.read(tmp_path / "end.json")
    assert end is not None and end.process_failed is process_failed and type(error).__name__ in end.cause


def test_a_success_has_no_report_and_only_the_outermost_command_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe()
    assert not restarts_itself(recipe.train)
    recipe.train.restarts = 1
    assert restarts_itself(recipe.train)
    assert "has no effect here" in restart_notices(recipe.train)[0]
    monkeypatch.setenv(REPORT, "/nowhere/end.json")
    monkeypatch.setenv(AFTER, "")
    assert not restarts_itself(recipe.train) and not restart_notices(recipe.train)
    with reporting_end():
        pass
    monkeypatch.setenv(AFTER, "a kill")
    assert restart_notices(recipe.train) == ["restarted after: a kill"]


def test_a_recipe_without_checkpoints_cannot_restart() -> None:
    recipe = Recipe()
    recipe.train.restarts, recipe.train.save_every = 3, 0
    assert [error.key for error in restart_errors(recipe)] == ["train.restarts"]
    recipe.train.save_every = 20
    assert not list(restart_errors(recipe))
    recipe.cluster.transport = "torchrun"
    assert "max-restarts" in str(next(iter(restart_errors(recipe))))


def test_ctrl_c_stops_the_child_and_starts_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'on').touch()\ntime.sleep(600)"
    )
    program = (
        "from pathlib import Path; from megarl.recipe import Recipe; import sys\n"
        "from megarl.commands.train_with_restarts import train_with_restarts\n"
        f"r = Recipe(); r.train.restarts = 3; r.runs_dir = {str(tmp_path)!r}\n"
        f"train_with_restarts(r, Path('x'), [], debug=False, train=(sys.executable, {str(tmp_path / 'train.py')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "on").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=30)
    assert process.returncode != 0 and "started again" not in words
    assert not lives(child)
