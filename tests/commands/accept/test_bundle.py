"""The bundle of an acceptance: its parts, and what it leaves out."""

from __future__ import annotations

import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.commands.accept import bundle
from megarl.commands.accept.result import (
    NOT_RUN,
    RecordedCheck,
    StageResult,
    limited,
    stage_verdict,
)
from megarl.commands.accept.settings import Settings
from megarl.commands.doctor.machine import Output
from megarl.platform.kinds import KINDS


class TestBundle:
    def results(self) -> list[StageResult]:
        checks = [limited("fine", 0.001, "<=", 0.01), limited("attention", 0.3, "<=", 0.01, cause="wrong | kernel")]
        return [
            stage_verdict(1, "kernels", checks, 12.3),
            stage_verdict(2, "model parity", [RecordedCheck("x", NOT_RUN, cause="no time")], 0.0),
        ]

    def test_verdict_page_begins_with_the_failure(self):
        page = bundle.verdict_page(Settings("cpu", 2), self.results())
        lines = page.splitlines()
        assert lines[0] == "# FAIL: stage 1, kernels: attention: 0.3 (<= 0.01): wrong | kernel"
        assert "| 1 kernels | FAIL | 12 | 1 of 2 | attention: 0.3 (<= 0.01): wrong \\| kernel |" in lines
        checks = [line for line in lines if "| FAIL | 0.3 | <= 0.01 |" in line or "| PASS | 0.001 | <= 0.01 |" in line]
        assert [line.split(" | ")[0] for line in checks] == ["| attention", "| fine"]
        assert "2 model parity | NOT RUN" in page

    def test_archive_holds_the_ends_of_logs_and_no_models(self, tmp_path):
        directory = tmp_path / "accept-x"
        (directory / "1-kernels").mkdir(parents=True)
        (directory / "1-kernels" / "log.txt").write_text("first line\n" + "x" * bundle.TAIL)
        (directory / "1-kernels" / "trace.bin").write_bytes(b"0" * (bundle.MOST + 1))
        (directory / "shared").mkdir()
        (directory / "shared" / "model.safetensors").write_bytes(b"0" * 10)
        run = directory / "6-rl_step" / "runs" / "tiny"
        (run / "checkpoints" / "step_1").mkdir(parents=True)
        (run / "checkpoints" / "step_1" / "state.json").write_text("{}")
        (run / "metrics.jsonl").write_text("{}")
        archive = tmp_path / "accept-x.tar.gz"
        problems = bundle.write_bundle(directory, Settings("cpu", 2), self.results(), archive)
        assert any("trace.bin" in problem for problem in problems)
        with tarfile.open(archive) as tar:
            names = set(tar.getnames())
            log = tar.extractfile("accept-x/1-kernels/log.txt").read()
        assert {
            "accept-x/verdict.md",
            "accept-x/packages.txt",
            "accept-x/environment.txt",
            "accept-x/devices.txt",
        } <= names
        assert log.startswith(b"... the last 256 KiB") and b"first line" not in log
        assert "accept-x/6-rl_step/runs/tiny/metrics.jsonl" in names and not any(
            "checkpoints" in name for name in names
        )
        assert not any("safetensors" in name or "trace.bin" in name for name in names)

    def test_traces_are_packed_up_to_a_limit(self, tmp_path, monkeypatch):
        directory = tmp_path / "accept-x"
        traces = directory / "6-rl_step" / "runs" / "tiny" / "profile"
        (traces / "step_2").mkdir(parents=True)
        (traces / "step_2" / "rank0.json.gz").write_bytes(b"0" * (bundle.MOST + 1))
        (traces / "step_2" / "rank1.json.gz").write_bytes(b"0" * (bundle.MOST + 2))
        monkeypatch.setattr(bundle, "ALL_TRACES", 2 * bundle.MOST)
        archive = tmp_path / "accept-x.tar.gz"
        problems = bundle.write_bundle(directory, Settings("cpu", 2), self.results(), archive)
        with tarfile.open(archive) as tar:
            names = {name.rpartition("/")[2] for name in tar.getnames()}
        assert "rank0.json.gz" in names and "rank1.json.gz" not in names
        assert any("1 files of traces, above 2 MiB" in problem for problem in problems)

    def test_logs_that_cannot_be_read_are_left_out(self, tmp_path, monkeypatch):
        """Logs of a driver may be readable by root only."""
        directory, logs = tmp_path / "accept-x", tmp_path / "slog"
        directory.mkdir()
        logs.mkdir()
        for name in ("closed", "hidden", "open"):
            (logs / f"{name}.log").write_text("x" * (bundle.TAIL + 1))

        def refuse(method: str, name: str) -> None:
            original = getattr(Path, method)

            def refused(path: Path, *args: object, **options: object) -> object:
                if path.name == name:
                    raise PermissionError(13, "Permission denied", str(path))
                return original(path, *args, **options)

            monkeypatch.setattr(Path, method, refused)

        refuse("open", "closed.log")
        refuse("stat", "hidden.log")
        kind = SimpleNamespace(logs=(f"{logs}/*.log",), status_commands=(), device_commands=(), plural="devices")
        monkeypatch.setattr(bundle, "kind_of", lambda _: kind)
        archive = tmp_path / "accept-x.tar.gz"
        problems = bundle.write_bundle(directory, Settings("cpu", 2), self.results(), archive)
        assert len(problems) == 2 and all(problem.endswith(": Permission denied") for problem in problems)
        assert "hidden.log" in problems[0] and "closed.log" in problems[1]
        with tarfile.open(archive) as tar:
            assert next(name for name in tar.getnames() if "slog" in name).endswith("open.log")

    def test_an_incomplete_archive_is_deleted(self, tmp_path, monkeypatch):
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(bundle, "_add_all", full)
        with pytest.raises(OSError, match="No space left"):
            bundle.write_bundle(tmp_path, Settings("cpu", 2), self.results(), tmp_path / "accept-x.tar.gz")
        assert not list(tmp_path.glob("*.tar.gz*")) and not list(tmp_path.glob(".*"))

    def test_commands_of_each_device(self, monkeypatch):
        """hccn_tool for every device; a command that is not installed is named once."""
        names: list[str] = []

        def run(words: list[str], *_: object) -> Output | None:
            names.append(" ".join(words))
            return None if words[0] == "npu-smi" else Output(0, f"link of {words[2]}", "")

        monkeypatch.setattr(bundle, "run", run)
        problems: list[str] = []
        text = bundle.device_status(Settings("npu", 2), problems)
        assert "$ hccn_tool -i 0 -link -g\nlink of 0" in text and "$ hccn_tool -i 1 -link -g\nlink of 1" in text
        assert problems == ["npu-smi: command not found"] and names.count("npu-smi info") == 1

    def test_environment_is_an_allow_list_without_secrets(self):
        prefixes = [kind.environment[0] for kind in KINDS if kind.environment]
        assert prefixes, "kinds of devices name their variables"
        inherited = {
            f"{prefixes[0]}X": "1",
            "AWS_SECRET_ACCESS_KEY": "s",
            "VLLM_API_KEY": "s",
            "VLLM_USE_V1": "1",
            "HOME": "/h",
        }
        inherited |= {"RAY_AUTH_TOKEN": "s", "HF_TOKEN": "s"}
        assert set(bundle.environment(inherited).split()) == {f"{prefixes[0]}X=1", "VLLM_USE_V1=1"}
