"""A command in a child process: how it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.commands import child
from megarl.commands.child import run_child


def test_an_interrupt_kills_a_child_that_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "trap '' TERM INT; echo $$; while :; do sleep 0.05; done"
    lines = interrupt_waits(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run_child(["sh", "-c", deaf], os.environ, stop_seconds=0.01)
    assert not psutil.pid_exists(int(lines[0]))


@pytest.mark.parametrize(("status", "raised"), [(130, SystemExit), (1, KeyboardInterrupt)])
def test_the_stop_is_reported_once(status: int, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """The child reports the stop if the signal reached it, else this process does."""
    lines = interrupt_waits(monkeypatch, KeyboardInterrupt)
    with pytest.raises(raised):
        run_child(["sh", "-c", f"trap 'exit {status}' INT; ps -o pgid= $$; while :; do sleep 0.05; done"], os.environ)
    assert int(lines[0]) != os.getpgid(0), "Ctrl-C at a terminal would reach both"


def test_a_second_signal_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child then ends its run in order; the fourth signal kills it."""
    lines = interrupt_waits(monkeypatch, *[SystemExit(143)] * 3)
    counts = "n=0; trap 'n=$((n+1)); echo $n; [ $n = 3 ] && exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    with pytest.raises(SystemExit, match="143"):
        run_child(["sh", "-c", counts], os.environ, stop_seconds=None)
    assert lines == [b"ready\n", b"1\n", b"2\n"]


def interrupt_waits(monkeypatch: pytest.MonkeyPatch, *raised: BaseException | type[BaseException]) -> list[bytes]:
    """Let waits for the child raise these, one each, when it has printed a line. Returns the lines, at first none.

    Also fails if `Popen.wait` is called before the child has ended: it cannot be interrupted safely.
    """
    children: list[subprocess.Popen[bytes]] = []
    lines: list[bytes] = []
    ends_within, fetch_status = child.ends_within, subprocess.Popen.wait

    class Child(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, stdout=subprocess.PIPE, **options)
            children.append(self)

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is None and (self.returncode is not None or ends_within(self.pid, 5.0))
            return fetch_status(self)

    def interrupted(pid: int, seconds: float | None) -> bool:
        if len(lines) < len(raised):
            assert children[0].stdout is not None
            lines.append(children[0].stdout.readline())
            raise raised[len(lines) - 1]
        return ends_within(pid, seconds)

    monkeypatch.setattr(child, "ends_within", interrupted)
    monkeypatch.setattr(subprocess, "Popen", Child)
    return lines


@pytest.mark.parametrize("program", ["megarl", "__main__.py"])
def test_messages_of_a_child_name_the_command_as_it_was_started(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With `train.restarts`, `megarl train` runs `python -m megarl train`."""
    monkeypatch.setattr(sys, "argv", [f"/home/me/.local/bin/{program}", "train"])
    write = "import sys, pathlib, megarl.errors; pathlib.Path(sys.argv[1]).write_text(megarl.errors.command_name())"
    assert run_child([sys.executable, "-c", write, str(tmp_path / "name")], os.environ) == 0
    assert (tmp_path / "name").read_text() == ("megarl" if program == "megarl" else "python -m megarl")


PARENT = """
import os, signal, sys
from megarl.commands.child import run_child

def stop(number, frame):
    raise SystemExit(3)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which lets processes ignore it
run_child(["sh", "-c", sys.argv[1]], os.environ)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_child_stops_with_a_process_that_hangs_up_or_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/cleaned; exit 143' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, script], start_new_session=True)
    try:
        wait_for(tmp_path / "ready")
        parent.send_signal(number)
        assert parent.wait(30) == (143 if number == signal.SIGHUP else -signal.SIGKILL)
        wait_for(tmp_path / "cleaned")
    finally:
        parent.kill()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_ignored_hangup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nohup` ignores it."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("SIGHUP is handled"))
    assert run_child(["true"], os.environ) == 0
