"""`tests.support.forks`: a forked process is as a fresh one, and none outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import forks


def start(folder: Path, code: str, **variables: str) -> forks.Forked:
    """Run `code` as the module `child` with the argument "first"; output goes to log."""
    (folder / "child.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return forks.start("nothing", "child", ["first"], environment, folder / "log")


def test_arguments_environment_folder_and_output_are_the_childs(tmp_path: Path) -> None:
    code = "import os, sys\nprint(sys.argv[1:], os.environ.get('ONE'), os.environ.get('TWO'), os.getcwd(), __name__)"
    for variables, seen in (({"ONE": "1"}, "1 None"), ({"TWO": "2"}, "None 2")):
        assert start(tmp_path, code, **variables).wait(20) == 0
        assert (tmp_path / "log").read_text() == f"['first'] {seen} {forks.ROOT} __main__\n"


@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [("import sys; sys.exit(3)", 3, ""), ("assert 1 > 2, 'words'", 1, "AssertionError: words"), ("", 0, "")],
)
def test_the_status_is_the_interpreters(tmp_path: Path, code: str, status: int, printed: str) -> None:
    assert start(tmp_path, code).wait(20) == status
    assert printed in (tmp_path / "log").read_text()


def test_one_of_two_processes_is_killed(tmp_path: Path) -> None:
    first, second = (start(tmp_path, "import time; time.sleep(60)") for _ in range(2))
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    first.kill()
    assert first.wait(20) == -signal.SIGKILL and second.poll() is None
    second.kill()
    assert second.wait(20) == -signal.SIGKILL


def test_a_server_that_died_is_replaced(tmp_path: Path) -> None:
    lost = start(tmp_path, "import time; time.sleep(60)")
    server = psutil.Process(lost.pid).parent()
    assert server is not None
    server.kill()
    os.kill(lost.pid, signal.SIGKILL)
    assert lost.wait(20) not in (0, None)
    assert start(tmp_path, "").wait(20) == 0


def test_processes_end_with_the_process_of_the_tests(tmp_path: Path) -> None:
    up = tmp_path / "up"
    (tmp_path / "child.py").write_text(f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(60)")
    code = (
        "import os, pathlib, time; from tests.support import forks\n"
        f"print(forks.start('nothing', 'child', [], {{**os.environ, 'PYTHONPATH': {str(tmp_path)!r}}}).pid, flush=True)\n"
        f"while not pathlib.Path({str(up)!r}).exists(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=forks.ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)
