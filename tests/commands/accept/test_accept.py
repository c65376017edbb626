"""The acceptance's runner, results and command line. Stages themselves: tests/commands/accept/test_stages.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.accept import command, runner
from megarl.commands.accept.catalogue import STAGES, shares, stage_numbers
from megarl.commands.accept.result import (
    NOT_RUN,
    REPORT,
    RecordedCheck,
    StageResult,
    from_json,
    limited,
    stage_verdict,
    to_json,
    verdict_of,
)
from megarl.commands.accept.settings import Settings, parse_stages, read_settings, write_settings
from megarl.errors import InputError

ROOT = Path(__file__).parents[3]
PLANTED = ROOT / "tests" / "planted"
ENVIRONMENT = STAGES[0]


def plant(monkeypatch: pytest.MonkeyPatch, module: str, fault: str) -> None:
    """Load `fault`, "module:function" of tests/planted, in `module` of all processes that start from now on."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLANTED), str(ROOT)]))
    monkeypatch.setenv("PLANTED_IN", module)
    monkeypatch.setenv("PLANTED_FAULT", fault)


def stage_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, seconds: float = 60.0) -> StageResult:
    """Result of the environment stage with its `run` replaced by a function of faults_of_stages."""
    plant(monkeypatch, "megarl.commands.accept.stages.environment", f"faults_of_stages:{fault}")
    write_settings(tmp_path, Settings("cpu", 2, recipe=str(ROOT / "recipes" / "quickstart.yaml")))
    return runner.run_stage(tmp_path, ENVIRONMENT, seconds)


class TestRunner:
    def test_a_stage_that_passes(self, monkeypatch, tmp_path):
        result = stage_with(monkeypatch, tmp_path, "passes")
        assert (result.verdict, result.reason) == ("PASS", "")
        assert [check.value for check in result.checks] == [0.01]

    def test_a_stage_starts_in_an_empty_folder(self, monkeypatch, tmp_path):
        """Runs and models of an earlier try would make `megarl train` and the copy of the recipe refuse to start."""
        run = ENVIRONMENT.folder(tmp_path) / "runs" / "colocated"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("{}")
        assert stage_with(monkeypatch, tmp_path, "passes").verdict == "PASS"
        assert not run.parent.exists()

    def test_the_first_failed_check_is_the_reason(self, monkeypatch, tmp_path):
        result = stage_with(monkeypatch, tmp_path, "fails")
        assert result.verdict == "FAIL"
        assert result.reason == "attention backward: 0.5 (<= 0.01): the kernel is wrong at [3, 1] (and 1 more)"

    def test_an_exception_names_the_progress_mark(self, monkeypatch, tmp_path):
        result = stage_with(monkeypatch, tmp_path, "raises")
        assert result.verdict == "FAIL"
        assert result.reason == "RuntimeError: no such engine at: opening the engine"

    def test_a_stage_that_hangs_is_killed_with_its_stacks(self, monkeypatch, tmp_path):
        child_file = ENVIRONMENT.folder(tmp_path) / "child.txt"

        def time_is_over(process, deadline, stop=None):
            """The time limit begins when the stage hangs, after a start of any length."""
            end = time.monotonic() + 60
            while not (child_file.exists() and child_file.read_text()) and time.monotonic() < end:
                time.sleep(0.05)
            return False

        monkeypatch.setattr(runner, "_wait", time_is_over)
        result = stage_with(monkeypatch, tmp_path, "hangs", seconds=4.0)
        assert result.verdict == "FAIL"
        assert result.reason.startswith("not finished after 4 s at: all_reduce over ranks 0 and 1")
        assert len(result.checks) == 1, "checks made before it hung are lost"
        folder = ENVIRONMENT.folder(tmp_path)
        log = (folder / runner.LOG).read_text()
        assert "faults_of_stages.py" in log and "in waiting_child" in log, "stacks of stage and child"
        child = int((folder / "child.txt").read_text())
        assert not Path(f"/proc/{child}").exists() or not runner._alive(child), "the stage's child lives on"

    def test_two_stages_at_a_time(self, monkeypatch, tmp_path):
        """Results are in the order of the numbers, and both are on disk."""
        both = threading.Barrier(2, timeout=20)

        def run_stage(directory, stage, seconds, stop):
            both.wait()
            return stage_verdict(stage.number, stage.name, [limited("x", 1.0, "<=", 2.0)], 1.0)

        monkeypatch.setattr(runner, "run_stage", run_stage)
        stages = [STAGES[1], STAGES[0]]
        results = runner.run_stages(tmp_path, stages, {0: 50.0, 1: 50.0}, lambda text: None, together=2)
        assert [result.number for result in results] == [0, 1]
        assert len(from_json((tmp_path / runner.RESULTS).read_text())) == 2

    def test_an_interrupt_ends_the_running_stage_and_starts_no_other(self, monkeypatch, tmp_path):
        """After an interrupt, neither a stage's processes nor later stages remain."""
        plant(monkeypatch, "megarl.commands.accept.stages.environment", "faults_of_stages:hangs")
        write_settings(tmp_path, Settings("cpu", 2))
        child = ENVIRONMENT.folder(tmp_path) / "child.txt"
        begun: list[str] = []

        def interrupt() -> None:
            end = time.monotonic() + 60
            while not (child.exists() and child.read_text()) and time.monotonic() < end:
                time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        waiting = threading.Thread(target=interrupt)
        waiting.start()
        with pytest.raises(KeyboardInterrupt):
            runner.run_stages(tmp_path, STAGES[:2], {0: 90.0, 1: 95.0}, begun.append)
        waiting.join()
        assert len(begun) == 1 and not (tmp_path / runner.RESULTS).exists()
        assert not runner._alive(int(child.read_text())), "the stage's child lives on"

    def test_the_time_limit(self):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            began = time.monotonic()
            assert not runner._wait(process, began + 0.3)
            assert 0.3 <= time.monotonic() - began < 5
            process.kill()
            assert runner._wait(process, time.monotonic() + 30)

    def test_a_stage_that_dies_names_the_signal(self, monkeypatch, tmp_path):
        result = stage_with(monkeypatch, tmp_path, "dies")
        assert result.reason == "killed by SIGSEGV at: a kernel that crashes"

    def test_a_stage_reads_settings_and_recipe(self, monkeypatch, tmp_path):
        result = stage_with(monkeypatch, tmp_path, "reads_settings")
        assert result.verdict == "PASS", result.reason

    def test_resume_keeps_finished_stages_and_runs_the_rest(self, monkeypatch, tmp_path):
        write_settings(tmp_path, Settings("cpu", 2))
        earlier = stage_verdict(0, "environment", [limited("x", 1.0, "<=", 2.0)], 3.0)
        (tmp_path / runner.RESULTS).write_text(to_json([earlier]))
        lines: list[str] = []
        results = runner.run_stages(tmp_path, [ENVIRONMENT], {0: 5.0}, lines.append)
        assert results == [earlier] and lines == ["0 environment: PASS (from the earlier call)"]
        (tmp_path / runner.RESULTS).unlink()
        plant(monkeypatch, "megarl.commands.accept.stages.environment", "faults_of_stages:passes")
        assert runner.run_stages(tmp_path, [ENVIRONMENT], {0: 60.0}, lines.append)[0].checks[0].name == "gap"
        assert from_json((tmp_path / runner.RESULTS).read_text())[0].verdict == "PASS"


class TestResults:
    def test_limits(self):
        assert limited("x", 1.0, "<=", 1.0).verdict == "PASS"
        assert limited("x", 1.1, "<=", 1.0).verdict == "FAIL"
        assert limited("x", float("nan"), "<=", 1.0).verdict == "FAIL"
        assert limited("x", 1.0, ">=", 1.0).verdict == "PASS"
        assert limited("x", 0.9, ">=", 1.0, cause="slow link").line() == "x: 0.9 (>= 1): slow link"
        assert limited("x", float("inf"), ">=", 1.0).verdict == "FAIL"
        assert limited("x", "a", "==", "b").verdict == "FAIL"

    def test_verdicts(self):
        good, bad, absent = (
            limited("a", 0, "<=", 1),
            limited("b", 2, "<=", 1),
            RecordedCheck("c", NOT_RUN, cause="no engine"),
        )
        assert stage_verdict(1, "s", [good, absent], 0).verdict == "PASS"
        assert stage_verdict(1, "s", [good, bad], 0).verdict == "FAIL"
        assert stage_verdict(1, "s", [good], 0, error="killed").reason == "killed"
        only = stage_verdict(1, "s", [absent], 0)
        assert (only.verdict, only.reason) == ("NOT RUN", "no engine")
        assert stage_verdict(1, "s", [], 0).verdict == "NOT RUN"
        passed, failed = stage_verdict(1, "s", [good], 0), stage_verdict(2, "t", [bad], 0)
        assert stage_verdict(1, "s", [RecordedCheck("layout", REPORT, "x"), absent], 0).verdict == "NOT RUN", (
            "a figure proves nothing"
        )
        assert stage_verdict(7, "speed", [RecordedCheck("rate", REPORT, 1.0)], 0).verdict == "PASS", (
            "a stage that only measures"
        )
        assert verdict_of([passed]) == ("PASS", "")
        assert verdict_of([passed, only]) == ("PASS", "stage 1, s, was not run: no engine")
        assert verdict_of([passed, failed]) == ("FAIL", "stage 2, t: b: 2 (<= 1)")
        assert verdict_of([only]) == ("NOT RUN", "stage 1, s, was not run: no engine")
        assert verdict_of([]) == ("NOT RUN", "no stage was run")

    def test_json_round_trip(self):
        result = stage_verdict(
            1,
            "s",
            [limited("a", 0.5, "<=", 1.0), RecordedCheck("b", REPORT, "x"), RecordedCheck("c", NOT_RUN, cause="why")],
            2.0,
        )
        assert from_json(to_json([result])) == [result]
        broken = stage_verdict(1, "s", [limited("a", float("nan"), "<=", 1.0)], 2.0)
        assert json.loads(to_json([broken]))[0]["checks"][0]["value"] == "NaN"


class TestCommand:
    def test_stages_of_a_command_line(self):
        numbers = stage_numbers()
        assert parse_stages("1-3,5", tuple(range(9))) == (1, 2, 3, 5)
        assert parse_stages(str(numbers[-1]), numbers) == (numbers[-1],)
        for wrong in ("9", "3-1", "a", "", "1-99"):
            with pytest.raises(InputError, match="names no stages"):
                parse_stages(wrong, tuple(range(9)))

    def test_stage_deadlines_increase_within_the_total_time(self):
        ends = shares(STAGES, 60.0)
        assert list(ends) == [stage.number for stage in STAGES]
        assert sorted(ends.values()) == list(ends.values()) and max(ends.values()) < 3600

    def test_settings_survive_for_resume(self, tmp_path):
        settings = Settings("cpu", 2, 1, 30.0, (0, 1), "/r.yaml", ("a=1",))
        write_settings(tmp_path, settings)
        assert read_settings(tmp_path) == settings
        with pytest.raises(InputError, match="is not the folder of an acceptance"):
            read_settings(tmp_path / "none")

    def test_expect_lists_every_stage_and_starts_none(self, capsys, tmp_path):
        options = command.AcceptOptions(device="cpu", out=tmp_path, expect=True)
        assert command.accept(ROOT / "recipes" / "quickstart.yaml", [], options) == 0
        text = capsys.readouterr().out
        for stage in STAGES:
            assert f"{stage.number} {stage.name}, " in text and stage.passes in text
        assert "8 bundle" in text and not list(tmp_path.iterdir())

    def test_expected_stages_of_a_resumed_acceptance(self, capsys, tmp_path):
        """`--expect` shows the stages of `--stages` too, and writes nothing."""
        write_settings(tmp_path, Settings("cpu", 2, stages=(0,)))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        options = command.AcceptOptions(resume=tmp_path, stages="1", expect=True)
        assert command.accept(None, [], options) == 0
        text = capsys.readouterr().out
        assert "0 environment, " in text and "1 kernels, " in text and "2 model" not in text
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        with pytest.raises(InputError, match="names no stages"):
            command.accept(None, [], replace(options, stages="99"))

    def test_the_verdict_is_printed_if_the_bundle_fails(self, monkeypatch, tmp_path, capsys):
        def full(*_: object) -> list[str]:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(command, "write_bundle", full)
        with pytest.raises(OSError, match="No space left"):
            command.accept(None, [], command.AcceptOptions(device="cpu", stages="8", out=tmp_path))
        assert "NOT RUN: no stage was run" in capsys.readouterr().out

    def test_bad_input_is_refused_before_files_are_written(self, tmp_path):
        with pytest.raises(InputError, match="RAY_ADDRESS"):
            command.accept(None, [], command.AcceptOptions(device="cpu", nodes=2, out=tmp_path))
        with pytest.raises(InputError, match=r"cluster\.device"):
            command.accept(None, [], command.AcceptOptions(device="tpu", out=tmp_path))
        assert not list(tmp_path.iterdir())

    def test_exit_status_and_archive(self, monkeypatch, tmp_path, capsys):
        options = command.AcceptOptions(device="cpu", stages="0,8", out=tmp_path)
        plant(monkeypatch, "megarl.commands.accept.stages.environment", "faults_of_stages:fails")
        assert command.accept(None, [], options) == 1
        (archive,) = tmp_path.glob("accept-*.tar.gz")
        assert "FAIL: stage 0, environment: attention backward" in capsys.readouterr().out
        directory = archive.with_name(archive.name.removesuffix(".tar.gz"))
        assert command.accept(None, [], command.AcceptOptions(resume=directory)) == 1, "the failure is kept"
        monkeypatch.setenv("PLANTED_FAULT", "faults_of_stages:passes")
        assert command.accept(None, [], command.AcceptOptions(resume=directory)) == 1, (
            "a stage that has ended does not run"
        )
        assert command.accept(None, [], command.AcceptOptions(resume=directory, stages="0")) == 0, (
            "it is named, and runs again"
        )

    @pytest.mark.parametrize("options", [{"minutes": 5.0}, {"nodes": 2}, {"device": "cpu"}, {"out": Path("x")}])
    def test_resume_refuses_options_that_it_would_ignore(self, tmp_path, options):
        write_settings(tmp_path, Settings("cpu", 2, stages=(0,)))
        with pytest.raises(InputError, match=f"omit --{next(iter(options))}"):
            command.accept(None, [], command.AcceptOptions(resume=tmp_path, **options))

    def test_broken_results_are_an_input_error(self, tmp_path):
        write_settings(tmp_path, Settings("cpu", 2, stages=(0,)))
        (tmp_path / runner.RESULTS).write_text('[{"number": 0}')
        with pytest.raises(InputError, match="Delete it"):
            command.accept(None, [], command.AcceptOptions(resume=tmp_path))
