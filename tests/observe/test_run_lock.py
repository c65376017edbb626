"""The lock of a run directory on a file system without file locks, and what commands say about runs there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from megarl.commands.live_controller import find_controller
from megarl.commands.quickstart import set_aside
from megarl.errors import InputError
from megarl.observe.log import RunLog
from megarl.observe.page.viewed_run import ViewedRun
from megarl.observe.run_dir import RunDirectory
from tests.support.log_recipe import make_recipe


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_the_process_of_a_run_is_known_until_the_run_ends(tmp_path: Path) -> None:
    run, reader = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert reader.holder() is None
    warning = run.lock()
    assert warning is not None and "without file locks (No locks available)" in warning
    holder = reader.holder()
    assert holder is not None and (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
    assert holder["unlocked"] is True and find_controller(tmp_path)[0] == os.getpid()
    run.unlock()
    assert reader.holder() is None
    with pytest.raises(InputError, match="no run is alive"):
        find_controller(tmp_path)


def test_a_run_that_ends_keeps_the_record_of_the_run_after_it(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()
    second.lock()
    record = {"pid": 1, "host": "node7", "since": "2026-01-01 00:00:00"}
    (tmp_path / "run.lock").write_text(json.dumps(record))  # as if the second process were on another machine
    first.unlock()
    assert second.holder() == {**record, "unlocked": True}
    (tmp_path / "run.lock").unlink()
    second.unlock()
    assert second.holder() is None


def test_a_live_run_is_running_until_it_is_silent_for_an_hour(tmp_path: Path) -> None:
    log = RunLog(make_recipe(), tmp_path, 1, 5)
    log.step(1)
    viewed = ViewedRun(0, tmp_path, "mine")
    assert viewed.state()["status"] == "running" and viewed.overview()["faults"] == []
    written = {path: path.stat() for path in tmp_path.iterdir() if path.is_file()}
    for path, status in written.items():
        os.utime(path, (status.st_atime, status.st_mtime - 3700))
    silent = ViewedRun(0, tmp_path, "mine").overview()
    assert silent["status"]["name"] == "unknown" and silent["faults"] == []
    log.close("finished")
    assert ViewedRun(0, tmp_path, "mine").state()["status"] == "finished"


def test_quickstart_renames_no_run_that_may_be_alive(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "quickstart")
    run.lock()
    with pytest.raises(InputError, match=rf"may be in use .*process {os.getpid()} .*remove .*run\.lock"):
        set_aside(run.path)
    (run.path / "run.lock").unlink()
    set_aside(run.path)
    assert not run.path.exists()
