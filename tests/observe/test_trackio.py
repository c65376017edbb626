"""trackio itself, on a local database: runs only where it is installed, since it needs an older Pillow than megarl's packages."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="trackio is not installed")

CODE = """
import math, sys
from pathlib import Path
from megarl.observe.log import RunLog
from megarl.observe.stdout import kept_stdout
from tests.support.log_recipe import make_recipe

with kept_stdout():
    for first, last in ((1, 2), (3, 4)):
        recipe = make_recipe(trackers=["trackio"], project="mine", console="json")
        with RunLog(recipe, Path(sys.argv[1]), first, last) as log:
            for step in range(first, last + 1):
                log.add({"critic/rewards/mean": step / 4, "eval/pass@1": math.nan})
                log.step(step)
"""


def test_two_sessions_are_one_run_in_the_database(tmp_path: Path) -> None:
    """trackio prints, also when the interpreter exits: stdout has the events alone."""
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "run")], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "end", done.stdout
    name = json.loads((tmp_path / "run" / "trackers.json").read_text())["trackio"]
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(run, step) for run, step, _ in rows] == [(name, step) for step in (1, 2, 3, 4)]
    values = [json.loads(metrics) for *_, metrics in rows]
    assert [value["critic/rewards/mean"] for value in values] == [0.25, 0.5, 0.75, 1.0]
    assert values[0]["eval/pass@1"] == "NaN"
