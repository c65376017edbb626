"""Output of workers reaches the log up to a limit, and a worker never waits for a full log."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import NoReturn

import pytest

from megarl.subprocess_pool.output import WorkerOutput
from tests.support.stack import ROOT, environment


def printed(output: WorkerOutput, data: bytes) -> None:
    pid = os.fork()
    if pid == 0:
        output.redirect()
        os.write(1, data)
        os.write(2, b"!")
        os._exit(0)
    os.waitpid(pid, 0)


def test_output_is_passed_on_up_to_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput(limit=10)
    printed(output, b"abcdef")
    output.forward()
    assert capfd.readouterr().out == "abcdef!"
    printed(output, b"ghijkl")
    output.forward()
    assert (
        capfd.readouterr().out
        == "ghi\n[the processes of this pool printed 10 bytes; their further output is dropped]\n"
    )
    printed(output, b"x" * 100)
    output.forward()
    assert capfd.readouterr().out == ""


def test_a_pipe_of_the_systems_size_serves_where_a_larger_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system limits the size of all pipes of a user (fs.pipe-user-pages-soft)."""

    def refuse(*_: object) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    output = WorkerOutput()
    printed(output, b"abc")
    output.forward()
    assert capfd.readouterr().out == "abc!"


CALLS = """
from megarl.subprocess_pool.pool import ProcessPool
options = {"processes": 1, "timeout": 60.0, "retries": 0, "timeout_key": "reward.timeout"}
pool = ProcessPool("tests.support.pool_jobs:find", ["prints"], {}, **options)
pool.start()
for _ in range(3):
    assert pool.submit("prints", "x" * (10 << 20)).result(60).value is None
pool.close()
"""


def test_a_function_that_prints_without_end_does_not_fill_the_log() -> None:
    """Each call prints 10 MiB, which is more than the pipe holds; two of them are more than the limit."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True, timeout=120
    )
    assert (16 << 20) <= len(done.stdout) < (17 << 20) and done.stdout.count(b"is dropped]") == 1
