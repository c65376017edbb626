"""RunLog and its sinks: the controller's metrics and notices reach the files and trackers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.json_lines import read_lines
from megarl.observe.log import RunLog
from megarl.observe.metrics import read_metrics
from megarl.observe.page.trace_tail import TraceTail
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sinks import GuardedTracker, make_sinks
from tests.support.log_recipe import make_recipe


def notices(path: Path) -> list[str]:
    return [record["text"] for record in read_lines(RunDirectory(path).notices)[0]]


# ---- phases and steps


def test_phases_nest_repeat_and_add_up(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 2) as log:
        for _ in range(2):
            with log.phase("gen"):
                time.sleep(0.02)
                with log.phase("reward"):
                    time.sleep(0.03)
        with pytest.raises(RuntimeError), log.phase("update_actor"):
            raise RuntimeError
        log.step(1)
        with log.phase("gen"):
            pass
        log.step(2)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["timing_s/reward"] >= 0.06
    assert first["timing_s/gen"] >= first["timing_s/reward"] + 0.04
    assert first["timing_s/step"] >= first["timing_s/gen"]
    assert "timing_s/update_actor" in first, "a phase that failed took its time too"
    assert second["timing_s/gen"] < 0.02, "times restart with each step"
    spans = TraceTail(tmp_path / "trace.json").spans()
    assert [span["name"] for span in spans] == ["reward", "gen", "reward", "gen", "update_actor", "gen"]
    assert [span["args"] for span in spans[:2]] == [{"step": 1, "inside": "gen"}, {"step": 1}]
    reward, gen = spans[:2]
    assert gen["ts"] <= reward["ts"] and reward["ts"] + reward["dur"] <= gen["ts"] + gen["dur"] + 1000


def test_withdrawn_metrics_leave_their_time(tmp_path: Path) -> None:
    """A failed attempt's metrics are withdrawn. Its times stay: speeds are computed from the times of phases."""
    with RunLog(make_recipe(samples_per_step=4), tmp_path / "run", 1, 5) as log:
        log.add({"timing_s/gen": 1.0, "kept": 1.0})
        before = log.pending()
        log.add({"timing_s/gen": 4.0, "timing_s/update_actor": 2.0, "withdrawn": 1.0})
        log.withdraw_metrics(before, phase="recovery")
        assert log.pending() == {"timing_s/gen": 1.0, "kept": 1.0, "timing_s/recovery": 5.0}


def test_a_repeated_step_is_not_logged(tmp_path: Path) -> None:
    with RunLog(make_recipe(samples_per_step=4), tmp_path / "run", 1, 5) as log:
        log.add({"grad": 1.0})
        with log.repeating() as metrics:
            log.add({"grad": 2.0})
            log.samples(1, [{"text": "again"}])
            with log.phase("update_actor"):
                pass
        assert metrics["grad"] == 2.0 and "timing_s/update_actor" in metrics and log.pending() == {"grad": 1.0}
        assert not list((tmp_path / "run").glob("samples/*"))


def test_evaluations_are_written_to_their_steps_line(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 2) as log:
        with log.phase("eval"):
            pass
        log.evaluation(0, {"pass@1": 0.1})
        log.add({"a": 1.0})
        log.evaluation(1, {"eval/pass@1": 0.2})
        log.step(1)
        log.step(2)
        log.evaluation(2, {"pass@1": 0.4})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["eval/pass@1"] for line in lines] == [0.1, 0.2, 0.4]
    assert "timing_s/eval" in lines[0] and "timing_s/eval" not in lines[1]
    assert lines[1]["a"] == 1.0 and "a" not in lines[0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 2
    assert summary["evaluation"] == {"first": {"step": 0, "eval/pass@1": 0.1}, "last": {"step": 2, "eval/pass@1": 0.4}}


def test_samples_are_capped(tmp_path: Path) -> None:
    with RunLog(make_recipe(samples_per_step=4), tmp_path, 1, 1) as log:
        log.samples(1, [{"group": i // 2, "response": str(i)} for i in range(10)])
    assert len((tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()) == 4
    with RunLog(make_recipe(samples_per_step=0), tmp_path / "none", 1, 1) as log:
        log.samples(1, [{"response": "x"}])
    assert not (tmp_path / "none" / "samples").exists()


def test_time_of_the_start_is_not_in_the_first_step(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 1) as log:
        with log.phase("start"):
            time.sleep(0.3)
        log.add({"weight_sync/bytes": 5})
        log.begin()
        log.step(1)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["timing_s/step"] < 0.3 and "timing_s/start" not in line
    assert line["weight_sync/bytes"] == 5
    (session,) = json.loads((tmp_path / "summary.json").read_text())["sessions"]
    assert session["start"]["seconds"] >= session["start"]["timing_s/start"] >= 0.3


def test_samples_of_a_step_whose_metrics_the_checkpoint_has_are_kept(tmp_path: Path) -> None:
    """SIGTERM ends a run after it has saved a step, and before it writes the step's metrics; the next start writes them."""
    log = RunLog(make_recipe(), tmp_path, 1, 10)
    for step in (1, 2, 3):
        log.samples(step, [{"response": "x"}])
        if step == 1:
            log.step(step)
    log.run_dir.unlock()  # like a kill: no file is closed
    with RunLog(make_recipe(), tmp_path, 2, 10, trained_steps=2) as log:
        log.step(2)
    assert sorted(path.name for path in (tmp_path / "samples").glob("*.jsonl")) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]


def test_resume_moves_later_steps_aside_with_a_notice(tmp_path: Path) -> None:
    recipe = make_recipe()
    log = RunLog(recipe, tmp_path, 1, 10)
    for step in range(1, 6):
        log.samples(step, [{"response": "x"}])
        log.step(step)
    log.run_dir.unlock()  # like a kill: no file is closed
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6')
    with RunLog(recipe, tmp_path, 4, 10) as log:
        assert log.next_step == 4
        log.step(4)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.discarded.jsonl")] == [4, 5]
    assert min((tmp_path / "samples" / "discarded").iterdir()).name == "step_000004.jsonl"
    messages = notices(tmp_path)
    assert "incomplete line" in messages[0] and "2 later steps" in messages[1]
    lines = [json.loads(line) for line in (tmp_path / "notices.jsonl").read_text().splitlines()]
    assert [line["level"] for line in lines[:2]] == ["notice", "warning"], "the console shows lost steps in every mode"
    sessions = json.loads((tmp_path / "summary.json").read_text())["sessions"]
    assert [(session["first_step"], session["status"]) for session in sessions] == [(1, "killed"), (4, "finished")]


def test_metrics_lost_in_a_crash_are_named(tmp_path: Path) -> None:
    log = RunLog(make_recipe(), tmp_path, 1, 10)
    log.step(1)
    log.run_dir.unlock()
    with RunLog(make_recipe(), tmp_path, 3, 10):
        pass
    assert "goes to step 1, the checkpoint to step 2" in notices(tmp_path)[0]


def test_a_nonfinite_metric_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 3) as log:
        for step in (1, 2, 3):
            log.add({"actor/grad_norm": math.nan if step > 1 else 1.0})
            log.step(step)
    assert notices(tmp_path) == ["actor/grad_norm is nan at step 2 (reported once per metric)."]
    assert "WARNING: actor/grad_norm is nan at step 2" in capsys.readouterr().out


def test_an_exception_closes_the_run_as_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunLog(make_recipe(report=True), tmp_path, 1, 3) as log:
        log.step(1)
        raise RuntimeError("engine 3 is gone")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: engine 3 is gone")
    assert "engine 3 is gone" in (tmp_path / "report.html").read_text()
    assert RunDirectory(tmp_path).holder() is None
    json.loads((tmp_path / "trace.json").read_text())


def test_a_failed_start_unlocks_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"observe\.trackers"):
        RunLog(make_recipe(trackers=["nonesuch"]), tmp_path, 1, 1)
    assert RunDirectory(tmp_path).holder() is None


def test_reading_a_recipe_and_logging_need_no_torch() -> None:
    code = (
        "import sys, megarl.observe.log, megarl.commands.report\n"
        "from megarl.observe.sinks import TensorBoardSink\n"
        "from megarl.observe.run_dir import RunDirectory\n"
        "import tempfile; TensorBoardSink(RunDirectory(tempfile.mkdtemp()), 1)\n"
        "assert not {'torch', 'ray', 'vllm', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- sinks


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, value in ((1, 5, 1.0), (4, 6, 2.0)):
        with RunLog(make_recipe(tensorboard=True), tmp_path, first, 6) as log:
            for step in range(first, last + 1):
                log.add({"critic/rewards/mean": value * step, "eval/pass@1": 0.25})
                log.step(step)
                if (first, step) == (1, 1):
                    live = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
                    assert live.Scalars("eval/pass@1")[0].value == 0.25, "each step is visible at once"
        time.sleep(1.1)  # TensorBoard orders a run's files by the second in their names
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("critic/rewards/mean")
    assert [(event.step, event.value) for event in scalars] == [(1, 1), (2, 2), (3, 3), (4, 8), (5, 10), (6, 12)]


@pytest.mark.parametrize("tracker", ["wandb", "swanlab", "mlflow", "trackio"])
def test_a_missing_tracker_is_named_with_its_install_command(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == tracker:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, tracker, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ValueError, match=f"pip install {tracker}"):
        make_sinks(make_recipe(trackers=[tracker]), RunDirectory(tmp_path), 1, print)


class FakeRun:
    """A fake of each tracker's run that records the calls."""

    def __init__(self) -> None:
        self.id = self.name = "abc123"
        self.info = types.SimpleNamespace(run_id="abc123")
        self.logged: list[Any] = []
        self.started: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def start(self, **arguments: Any) -> FakeRun:
        self.started.append(arguments)
        return self

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)

    def end(self, **arguments: Any) -> None:
        self.ended.append(arguments)

    def ignore(self, *_: Any, **__: Any) -> None:
        """Calls of no interest here."""

    finish, end_run, init, start_run = end, end, start, start
    define_metric = set_experiment = log_dict = ignore


@pytest.mark.parametrize("tracker", ["wandb", "swanlab", "mlflow", "trackio"])
def test_trackers_get_every_step_and_continue_after_a_resume(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, tracker, fake)  # type: ignore[arg-type]
    for first in (1, 2):
        with RunLog(make_recipe(trackers=[tracker]), tmp_path, first, 2) as log:
            log.add({"eval/pass@1": 0.5})
            log.step(first)
    name = "eval/pass_at_1" if tracker == "mlflow" else "eval/pass@1"
    steps = [step if step is not None else metrics["step"] for step, metrics in fake.logged]
    assert steps == [1, 2] and all(metrics[name] == 0.5 for _, metrics in fake.logged)
    assert "abc123" not in fake.started[0].values() and "abc123" in fake.started[1].values()
    assert len(fake.ended) == 2


def test_a_failing_tracker_warns_once_and_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeRun):
        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            super().log(metrics, step)
            if metrics["step"] >= 2:
                raise ConnectionError("no route to host")

    fake = Failing()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    with RunLog(make_recipe(trackers=["wandb"]), tmp_path, 1, 4) as log:
        for step in range(1, 5):
            log.step(step)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert len(fake.logged) == 2, "left out after its first failure"
    (text,) = notices(tmp_path)
    assert "wandb failed at step 2" in text and "no route to host" in text


def test_a_full_disk_is_not_reported_as_a_trackers_failure(tmp_path: Path) -> None:
    """Only trackers are guarded: errors of the run's TensorBoard files are raised."""
    sinks = make_sinks(make_recipe(tensorboard=True), RunDirectory(tmp_path), 1, print)
    assert not any(isinstance(sink, GuardedTracker) for sink in sinks)


def test_phases_after_the_last_step_have_no_step(tmp_path: Path) -> None:
    with RunLog(make_recipe(report=True), tmp_path, 1, 2) as log:
        for step in (1, 2):
            with log.phase("gen"):
                pass
            log.step(step)
        with log.phase("export"):
            pass
        log.notice("exported")
    spans = TraceTail(tmp_path / "trace.json").spans()
    assert [(span["name"], span["args"].get("step")) for span in spans] == [("gen", 1), ("gen", 2), ("export", None)]
    assert '"steps":[1,2]},"has_trace":true' in (tmp_path / "report.html").read_text(), "the timeline's steps"
    assert read_lines(RunDirectory(tmp_path).notices)[0][-1]["step"] == 2
