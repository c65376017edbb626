"""The last output of a failed run: the cause, then the last checkpoint and how to resume, each once."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megarl import cli
from megarl.atomic_files import DiskFullError
from megarl.checkpoint import next_commands
from megarl.errors import InputError
from megarl.exit_status import Terminated, guarded
from megarl.observe.log import RunLog
from tests.support.checkpoint_parts import saver, state
from tests.support.stack import ROOT
from tests.support.training_runs import settings


@pytest.fixture
def failing(
    quickstart_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run a training that writes checkpoints of `steps` and raises `error`; returns its exit status and stderr."""
    checkpoints = tmp_path / "runs" / "failing" / "checkpoints"
    handler = signal.getsignal(signal.SIGTERM)  # the command line replaces it

    def train(steps: list[int], error: BaseException, during: Callable[[], None] = lambda: None) -> tuple[int, str]:
        def fails(*_: object, **__: object) -> NoReturn:
            for step in steps:
                saver(checkpoints).save(step, state())
            during()
            raise error

        monkeypatch.setattr(importlib.import_module("megarl.train"), "connected", fails)
        arguments = [
            "train",
            str(ROOT / "recipes/quickstart.yaml"),
            *settings(quickstart_data, tmp_path / "runs", "failing"),
        ]
        status = guarded(lambda: cli.app(args=arguments, prog_name="megarl", standalone_mode=False), debug=False)
        return status, capsys.readouterr().err

    yield train
    signal.signal(signal.SIGTERM, handler)


def test_the_last_checkpoint_and_the_resume_follow_the_cause_once(failing: Any, tmp_path: Path) -> None:
    status, stderr = failing([3, 7], RuntimeError("the machine burns"))
    where = tmp_path / "runs" / "failing" / "checkpoints" / "step_000007"
    cause, note, *rest = stderr.splitlines()[-3:]
    assert status == 1 and cause == "RuntimeError: the machine burns" and rest == ["(--debug shows the traceback)"]
    assert note == f"Last intact checkpoint: step 7, {where}. Resume from it: the same command with train.resume=auto."
    assert stderr.count("checkpoint") == 1 + str(where).count("checkpoint")


def test_a_failure_without_a_checkpoint_has_a_message(failing: Any) -> None:
    status, stderr = failing([], RuntimeError("the machine burns again"))
    assert status == 1 and "No checkpoint was written to" in stderr and "train.resume=auto starts over" in stderr


def test_an_unreadable_disk_does_not_hide_the_cause(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    status, stderr = failing(
        [], RuntimeError("the disk burns"), lambda: monkeypatch.setattr(next_commands, "resume_hint", unreadable)
    )
    assert status == 1 and "RuntimeError: the disk burns" in stderr
    assert "The checkpoints could not be listed: [Errno 5] Input/output error" in stderr


def test_a_full_disk_at_the_end_does_not_hide_the_checkpoint(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes its summary last, also after a failure."""

    def full(*_: object) -> NoReturn:
        raise DiskFullError("no room for a summary")

    monkeypatch.setattr(RunLog, "__exit__", full)
    status, stderr = failing([3], RuntimeError("the machine burns"))
    assert (
        status == 1 and "DiskFullError: no room for a summary" in stderr and "Last intact checkpoint: step 3" in stderr
    )


def test_a_refused_run_prints_no_checkpoint(failing: Any) -> None:
    status, stderr = failing([], InputError("no such device"))
    assert status == 2 and "checkpoint" not in stderr


@pytest.mark.parametrize("error, status, end", [(KeyboardInterrupt(), 130, "Ctrl-C"), (Terminated(), 143, "SIGTERM")])
def test_a_stopped_run_prints_how_to_resume(failing: Any, error: BaseException, status: int, end: str) -> None:
    returned, printed = failing([3], error)
    assert returned == status and printed.splitlines()[-1] == f"stopped by {end}"
    assert "runs/failing" in printed and "Last intact checkpoint: step 3" in printed
    assert "Resume from it: the same command with train.resume=auto." in printed


def test_a_run_stopped_before_its_first_checkpoint_has_a_message(failing: Any) -> None:
    _, printed = failing([], KeyboardInterrupt())
    assert "No checkpoint was written" in printed and "train.save_every=1 writes the first after step 1" in printed


def test_a_cut_file_is_not_taken_for_ctrl_c(failing: Any) -> None:
    """typer turns every EOFError into an abort; a user's function raises one when it reads a cut pickle."""
    status, stderr = failing([], EOFError("Ran out of input"))
    assert status == 1 and "EOFError: Ran out of input" in stderr and "Ctrl-C" not in stderr


def test_the_broken_pipe_of_a_run_has_a_message(failing: Any) -> None:
    """typer ends every command at EPIPE without a word, also if the pipe is not stdout."""
    status, stderr = failing([], BrokenPipeError(32, "Broken pipe"))
    assert status == 1 and "BrokenPipeError: [Errno 32] Broken pipe" in stderr


def test_a_command_that_prints_ends_quietly_without_a_reader() -> None:
    program = "from megarl.cli import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program, "keys"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert ended.returncode == 1 and ended.stderr == ""
