"""The log file of a process begins with what a reader has to know about the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megarl.cluster.base import host_name
from megarl.cluster.failures import HEADER, log_tail
from megarl.platform.installed import version_lines

WRITE = """
import sys
from megarl.cluster.process import redirect_output
redirect_output(sys.argv[1], "trainer rank 3")
print("a line")
"""


def test_each_start_writes_the_process_and_its_versions(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer-3.log"
    pids = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE, str(log)], env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process:
            assert process.wait() == 0
            pids.append(process.pid)
    lines = log.read_text().splitlines()
    assert lines[1::2] == ["a line", "a line"]
    for head, pid in zip(lines[::2], pids, strict=True):
        assert head.startswith(f"{HEADER} trainer rank 3, pid {pid} on {host_name()}, 20")
        assert head.endswith("; ".join(["", *version_lines()]) + " ===") and "megarl 0." in head and "torch " in head


def test_messages_about_a_failure_have_the_output_without_the_first_line(tmp_path: Path) -> None:
    log = tmp_path / "trainer-3.log"
    subprocess.run([sys.executable, "-c", WRITE, str(log)], check=True)
    assert log_tail(str(log)) == "  a line"
