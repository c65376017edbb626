"""The log file of a process begins with what a reader has to know about the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megarl.cluster.base import host_name
from megarl.cluster.failures import HEADER
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
    heads = [line for line in lines if line.startswith(HEADER)]
    names = [f"{HEADER} trainer rank 3, pid {pid} on {host_name()}," for pid in pids]
    assert [head.startswith(name) for head, name in zip(heads, names, strict=True)] == [True, True]
    assert lines[1:4] == [*version_lines(), "a line"] and lines[5:] == lines[1:4]
    assert lines[1].startswith("megarl 0.") and "torch " in lines[2]
