"""Run stages in order, each in a process with a time limit, and write the results after each stage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.atomic_files import write_atomically
from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.sigstop_watch import process_fields
from megarl.commands.accept import stage_main
from megarl.commands.accept.catalogue import Stage
from megarl.commands.accept.context import CHECKS, DOING
from megarl.commands.accept.result import RecordedCheck, StageResult, from_json, stage_verdict, to_json
from megarl.commands.doctor.machine import import_path
from megarl.errors import InputError
from megarl.sandbox.usage import tree

RESULTS, LOG = "results.json", "log.txt"
STACK_SECONDS = 30.0  # time limit for processes to write their stacks and end
_POLL = 0.05

Say = Callable[[str], None]


def read_results(directory: Path) -> list[StageResult]:
    """Return the results of the finished stages in `directory`. Raises InputError for a damaged file."""
    path = directory / RESULTS
    try:
        return from_json(path.read_text(encoding="utf-8")) if path.exists() else []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}. Delete it to run all stages again.") from error


def run_stages(
    directory: Path, stages: Sequence[Stage], ends: Mapping[int, float], say: Say, *, together: int = 1
) -> list[StageResult]:
    """Start the stages that have no result in `directory` yet in this order, and return the results of all by number.

    ends: deadline of each stage in seconds from now (`catalogue.shares`). together: number of concurrent stages.
    """
    results = {result.number: result for result in read_results(directory)}
    began, lock, stop = time.monotonic(), threading.Lock(), threading.Event()

    def run(stage: Stage) -> None:
        seconds = began + ends[stage.number] - time.monotonic()
        say(f"{stage.number} {stage.name}: at most {seconds:.0f} s ...")
        result = run_stage(directory, stage, seconds, stop)
        with lock:
            results[stage.number] = result
            say(f"{result.line()}, {result.seconds:.0f} s")
            write_atomically(directory / RESULTS, to_json([results[number] for number in sorted(results)]).encode())

    for stage in stages:
        if stage.number in results:
            say(f"{results[stage.number].line()} (from the earlier call)")
    with ThreadPoolExecutor(together) as threads:
        calls = [threads.submit(run, stage) for stage in stages if stage.number not in results]
        try:
            for call in calls:
                call.result()
        except BaseException:  # also Ctrl-C: kill the running stages and start no other
            stop.set()
            for call in calls:
                call.cancel()
            raise
    return [results[number] for number in sorted(stage.number for stage in stages)]


class Stopped(Exception):
    """The acceptance was interrupted; the stage has no result."""


def run_stage(directory: Path, stage: Stage, seconds: float, stop: threading.Event | None = None) -> StageResult:
    """Run one stage in a child process. Files of an earlier try are deleted: its runs could not start again.

    After `seconds` the stage fails: all its processes write their Python stacks to their logs and are killed.
    """
    folder = stage.folder(directory)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    reaper = OrphanReaper()
    environment = {
        **os.environ,
        **reaper.env,
        "PYTHONPATH": import_path(os.environ),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", stage_main.__name__, str(directory), str(stage.number), f"{seconds}"]
    began = time.monotonic()
    try:
        with (folder / LOG).open("w") as log:
            # A new session: only the controller receives Ctrl-C, and it ends the stage.
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                in_time = _wait(process, began + seconds, stop)
                if not in_time:
                    dump_stacks(process.pid)
            finally:
                process.kill()
                process.wait()
    finally:
        reaper.close()
    took = time.monotonic() - began
    error = _error(folder, process.returncode, in_time, seconds)
    return stage_verdict(stage.number, stage.name, read_checks(folder), took, error=error)


def _wait(process: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None = None) -> bool:
    """Wait for the process. Return False at `deadline` (time.monotonic()). Raises Stopped when `stop` is set."""
    while process.poll() is None:
        if stop is not None and stop.is_set():
            raise Stopped
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _error(folder: Path, status: int, in_time: bool, seconds: float) -> str:
    """Return why a stage did not return: its exception, a signal or the time limit. "" if it returned."""
    doing = folder / DOING
    last = f" at: {doing.read_text(encoding='utf-8')}" if doing.exists() else ""
    if not in_time:
        return f"not finished after {seconds:.0f} s{last} (Python stacks are in its logs)"
    if (raised := folder / stage_main.ERROR).exists():
        return f"{raised.read_text(encoding='utf-8')}{last}"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}{last}"
    return f"exit status {status}{last}" if status else ""


def read_checks(folder: Path) -> list[RecordedCheck]:
    """Return the checks that the stage in `folder` has recorded so far."""
    path = folder / CHECKS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [RecordedCheck(**json.loads(line)) for line in lines if line.endswith("\n")]  # skip an incomplete line


def dump_stacks(root: int) -> None:
    """End `root` and its Python descendants, after they have written the stacks of their threads to their logs.

    One process runs at a time while the others are stopped. Otherwise processes would mix lines in a shared log, and a
    parent would react to the end of its child.
    """
    processes = [pid for pid in reversed(list(tree(root))) if _is_python(pid)]  # children before their parents
    for pid in processes:
        _signal(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STACK_SECONDS
    for pid in processes:
        _signal(pid, signal.SIGABRT)  # faulthandler writes stacks of all threads
        _signal(pid, signal.SIGCONT)
        while time.monotonic() < deadline and _alive(pid):
            time.sleep(_POLL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
        os.kill(pid, number)


def _is_python(pid: int) -> bool:
    """Return True for a Python process other than an orphan reaper: faulthandler prints its stack on SIGABRT."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"python" in words[0] and not any(word.endswith(b"orphan_reaper.py") for word in words)


def _alive(pid: int) -> bool:
    return process_fields(pid)[:1] not in ([], ["Z"])
