"""W&B, SwanLab and MLflow themselves, without a server, and starts that fail. A tracker that is not installed is skipped."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sinks import TRACKERS, make_sinks
from tests.support.log_recipe import make_recipe

# A run of steps 1 to 3, resumed after step 2.
CODE = """
import math, sys
from pathlib import Path
from megarl.observe.log import RunLog
from tests.support.log_recipe import make_recipe

for first, last in ((1, 3), (3, 4)):
    with RunLog(make_recipe(trackers=[sys.argv[1]], project="mine"), Path(sys.argv[2]), first, last) as log:
        for step in range(first, last + 1):
            log.add({"critic/rewards/mean": step / 4, "eval/pass@1": math.nan})
            log.step(step)
"""
LOCAL = {
    "wandb": {"WANDB_MODE": "offline"},
    "swanlab": {"SWANLAB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
}
# Environments in which a tracker cannot start, and words of the error. Port 9 of this machine answers nothing.
FAILING = {
    "wandb": ({"WANDB_BASE_URL": "http://127.0.0.1:9"}, "No API key configured", "WANDB_MODE=offline"),
    "swanlab": ({"SWANLAB_API_HOST": "http://127.0.0.1:9"}, "login", "SWANLAB_MODE=offline"),
    "mlflow": ({"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, "Connection refused", "sqlite:///mlflow.db"),
    "trackio": ({"TRACKIO_DIR": "a_file/trackio"}, "a_file", "TRACKIO_DIR"),
}


def run(tracker: str, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    secrets = ("WANDB", "SWANLAB", "MLFLOW", "TRACKIO")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(secrets)}
    home = {"HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE, tracker, str(folder / "run")]
    return subprocess.run(
        command, cwd=folder, env=inherited | home | environ, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("tracker", LOCAL)
def test_two_sessions_are_one_run_of_the_tracker(tmp_path: Path, tracker: str) -> None:
    done = run(tracker, tmp_path, LOCAL[tracker])
    assert done.returncode == 0, done.stderr
    assert "gets no more metrics" not in done.stdout
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())[tracker]
    if tracker == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        assert client.get_run(run_id).info.status == "FINISHED"
        history = [(each.step, each.value) for each in client.get_metric_history(run_id, "critic/rewards/mean")]
        assert history == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
        assert math.isnan(client.get_metric_history(run_id, "eval/pass_at_1")[0].value)
    else:
        sessions = list((tmp_path / "run" / tracker).glob(f"*run-*{run_id}"))
        assert len(sessions) == 2 and all(any(folder.iterdir()) for folder in sessions), sessions


@pytest.mark.parametrize("tracker", FAILING)
def test_a_start_that_fails_is_explained(tmp_path: Path, tracker: str) -> None:
    """Without the tracker's own waiting for minutes, and with what to do."""
    (tmp_path / "a_file").write_text("")
    environ, problem, remedy = FAILING[tracker]
    began = time.monotonic()
    done = run(tracker, tmp_path, environ)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("ValueError: observe.trackers: "), done.stderr
    assert f"{tracker} did not start (" in error and problem in error and remedy in error
    assert error.endswith("or remove it from observe.trackers.")
    assert time.monotonic() - began < 120
    assert RunDirectory(tmp_path / "run").holder() is None


class Tracker:
    """A tracker that starts."""

    def __init__(self, ended: list[str]) -> None:
        self.ended = ended

    def write(self, *_: Any) -> None: ...

    def close(self, status: str) -> None:
        self.ended.append(status)


def test_trackers_that_had_started_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def refuse(*_: Any) -> Any:
        raise ConnectionError("no route to host")

    for name, start in (("wandb", lambda *_: Tracker(ended)), ("mlflow", refuse)):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.setitem(TRACKERS, name, start)
    recipe = make_recipe(trackers=["wandb", "mlflow"])
    with pytest.raises(ValueError, match=r"mlflow did not start \(ConnectionError: no route to host\)\. Let MLFLOW_"):
        make_sinks(recipe, RunDirectory(tmp_path), 1, print)
    assert ended == ["failed"]
    with pytest.raises(ValueError, match=r"observe\.trackers"):
        RunLog(recipe, tmp_path, 1, 1)
    assert RunDirectory(tmp_path).holder() is None


def test_trackers_are_closed_if_spans_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", sys)
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: Tracker(ended))
    recipe = make_recipe(trackers=["wandb"])
    recipe.observe.otlp.url = "http://127.0.0.1:9"
    recipe.observe.otlp.headers = {"Authorization": "MEGARL_NO_SUCH_VARIABLE"}
    with pytest.raises(ValueError, match=r"observe\.otlp"):
        RunLog(recipe, tmp_path, 1, 1)
    assert ended == ["failed"]
