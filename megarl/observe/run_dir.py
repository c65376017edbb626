"""The directory of a run: its files and its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.atomic_files import disk_errors, write_atomically

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_ATTEMPTS, _PAUSE = 3, 0.02  # seconds; `RunDirectory.holder` of another process has the lock for microseconds


class RunDirectory:
    """The files of one run.

    ::

        recipe.resolved.yaml     all settings of the run
        hub.json                 commits of models and data sets on the hub, if the recipe names any
        metrics.jsonl            one line per step, flat keys (metrics.discarded.jsonl: lines that a resume discarded)
        notices.jsonl            notices and warnings, with their times and steps
        samples/                 step_000123.jsonl: generated text, with rewards
        tokens/                  step_000123.jsonl: tokens of a few samples, with log-probs, advantages and so on
        tensorboard/             event files
        trace.json               a timeline for Perfetto or chrome://tracing
        profile/                 step_3/: traces of trainers, engine0/: traces of an engine (observe.profile_...)
        tape/                    the run's events, for train.replay: controller.jsonl, a file per engine, judge.jsonl, recipes
        checkpoints/
        batches/                 batches since the newest checkpoint, until the run is complete (train.trainer_restarts, train.journal)
        journal/                 the controller's state after the newest steps, until the run is complete (train.journal)
        report.html  summary.json
        run.lock                 locked while the run is alive; records its process
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.resolved.yaml"
        self.hub_commits = self.path / "hub.json"
        self.metrics = self.path / "metrics.jsonl"
        self.discarded_metrics = self.path / "metrics.discarded.jsonl"
        self.notices = self.path / "notices.jsonl"
        self.samples = self.path / "samples"
        self.tokens = self.path / "tokens"
        self.tensorboard = self.path / "tensorboard"
        self.trace = self.path / "trace.json"
        self.profile = self.path / "profile"
        self.tape = self.path / "tape"
        self.checkpoints = self.path / "checkpoints"
        self.batches = self.path / "batches"
        self.journal = self.path / "journal"
        self.report = self.path / "report.html"
        self.summary = self.path / "summary.json"
        self.tracker_ids = self.path / "trackers.json"
        self._lock_path = self.path / "run.lock"
        self._lock: int | None = None
        self._unlocked_record: dict[str, Any] | None = None

    def has_results(self) -> bool:
        """Return True if the directory has metrics or checkpoints, which a fresh run would mix with its files."""
        if self.metrics.exists() and self.metrics.stat().st_size > 0:
            return True
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def is_run_directory(self) -> bool:
        """Return True if this is the directory of a run, even without a finished step."""
        return any(path.exists() for path in (self.recipe, self.metrics, self.summary))

    def require(self, command: str) -> None:
        """Raise ValueError if this is not the directory of a run. command: of megarl, for the message."""
        path = self.path
        if not path.exists():
            raise ValueError(f"{path} does not exist. Give the directory of a run, as in: megarl {command} runs/my-run")
        if not path.is_dir():
            raise ValueError(f"{path} is a file. Give the directory of a run: {path.parent}?")
        if not self.is_run_directory():
            inside = sorted(
                child.name for child in path.iterdir() if child.is_dir() and RunDirectory(child).is_run_directory()
            )
            hint = f" Runs inside it: {', '.join(inside[:5])}." if inside else ""
            raise ValueError(
                f"{path} is not a run directory: it has no recipe.resolved.yaml and no metrics.jsonl.{hint}"
            )

    def lock(self) -> str | None:
        """Create the directory if it is missing, and lock it until `unlock` or the end of this process.

        Returns None, or a warning if the file system has no locks: run.lock then only records this process, also after a kill. Raises ValueError
        at once if another live run has the lock; the message names that run's process.
        """
        if self._lock is not None:
            return None
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        warning = None
        try:
            _lock_exclusively(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(self._held_text()) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            self._unlocked_record = holder
            warning = (
                f"{self.path} is on a file system without file locks ({error.strerror}), so a second run could "
                "write into this directory at the same time. Make sure that none does."
            )
        self._lock = descriptor
        with disk_errors(self._lock_path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        return warning

    def unlock(self) -> None:
        """Release the lock. The lock file stays: deleting it would race with a run that opens it."""
        if self._lock is None:
            return
        try:
            if self._unlocked_record is not None and self._read_holder() == self._unlocked_record:
                with disk_errors(self._lock_path):
                    os.ftruncate(self._lock, 0)
        finally:
            os.close(self._lock)
            self._lock = self._unlocked_record = None

    def holder(self) -> dict[str, Any] | None:
        """Return the process that has the lock: ``{pid, host, since}`` (empty if unknown), or None.

        On a file system without locks it is the process that run.lock records, with ``unlocked: True``. It may have been killed; a
        run that ends removes its record.
        """
        if not self._lock_path.exists():
            return None
        descriptor = os.open(self._lock_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read_holder()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            record = self._read_holder()
            return {**record, "unlocked": True} if record else None
        finally:
            os.close(descriptor)
        return None

    def last_write(self) -> float | None:
        """Return when the run last wrote metrics, a notice, a span or its summary, in seconds since the epoch; None if it never did."""
        files = [path for path in (self.metrics, self.notices, self.trace, self.summary) if path.exists()]
        return max((path.stat().st_mtime for path in files), default=None)

    def write_recipe(self, text: str) -> None:
        """Write the resolved recipe. A different older recipe is kept as recipe.resolved.<n>.yaml."""
        data = text.encode()
        if self.recipe.exists():
            old = self.recipe.read_bytes()
            if old == data:
                return
            number = 1
            while (kept := self.path / f"recipe.resolved.{number}.yaml").exists():
                number += 1
            write_atomically(kept, old)
        write_atomically(self.recipe, data)

    def write_hub_commits(self, commits: Mapping[str, Mapping[str, str]]) -> None:
        """Write the commits by setting and name; with none no file remains."""
        if commits:
            write_atomically(self.hub_commits, json.dumps(commits, indent=1).encode())
        else:
            self.hub_commits.unlink(missing_ok=True)

    def _held_text(self) -> str:
        holder = self._read_holder()
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
        return (
            f"{self.path} is in use by another run ({who}). Wait for it or stop it, "
            "or give this run another name (name=...)."
        )

    def _read_holder(self) -> dict[str, Any]:
        try:
            holder = json.loads(self._lock_path.read_text())
        except (FileNotFoundError, ValueError):  # removed; or the other process has not written its process id yet
            return {}
        return holder if isinstance(holder, dict) else {}


def _lock_exclusively(descriptor: int) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE)
