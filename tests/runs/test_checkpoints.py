"""Checkpoints of complete runs: background saves, resume in another layout, kills in mid-write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megarl.observe.metrics import without_times
from tests.support.stack import ROOT, command, environment, metrics, run

pytestmark = pytest.mark.stack

STEPS = 4


def settings(data: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        "train",
        "recipes/quickstart_sft.yaml",
        f"model.path={data}/model",
        f"data.train_files=[{data}/data/sft.parquet]",
        "data.prompts_per_step=8",
        f"runs_dir={runs}",
        f"name={name}",
        f"train.steps={STEPS}",
        "train.save_every=1",
        "train.save_in_background=true",
        "train.keep_checkpoints=10",
        "train.export_at_end=false",
        "observe.report=false",
        *more,
    ]


def notices(run_dir: Path) -> str:
    return "\n".join(json.loads(line)["text"] for line in (run_dir / "notices.jsonl").read_text().splitlines())


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def names(*steps: int) -> list[str]:
    return [f"step_{step:06d}" for step in steps]


@pytest.fixture(scope="module")
def whole(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two trainers with expert parallelism, a background checkpoint after each."""
    runs = tmp_path_factory.mktemp("runs")
    done = run(*settings(quickstart_data, runs, "whole"), torchrun=2)
    assert done.returncode == 0, done.stderr + done.stdout
    return runs / "whole"


@pytest.mark.slow
def test_a_background_checkpoint_resumes_in_another_layout(whole: Path, quickstart_data: Path) -> None:
    """The newest checkpoint is damaged, the previous incomplete: the run resumes from step 2, on one trainer, with notices."""
    assert checkpoints(whole) == names(1, 2, 3, 4)
    before = metrics(whole)
    assert all("checkpoint/write_seconds" in line for line in before[1:-1])
    folder = whole / "checkpoints"
    (folder / "step_000003").rename(folder / ".step_000003.partial")
    largest = max((folder / "step_000004").rglob("*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    one_trainer = ["cluster.trainers=1", "megatron.expert_parallel=1"]
    done = run(*settings(quickstart_data, whole.parent, "whole", *one_trainer, "train.resume=auto"), torchrun=1)
    assert done.returncode == 0, done.stderr + done.stdout
    notice_text = notices(whole)
    assert "step_000003 was still being written" in notice_text
    assert f"step_000004 is damaged and is skipped: trainer/{largest.name}" in notice_text
    lines = [json.loads(line) for line in (whole / "notices.jsonl").read_text().splitlines()]
    assert {line["level"] for line in lines if "is skipped" in line["text"]} == {"warning"}
    assert "another layout (processes 2 -> 1, expert_parallel 2 -> 1)" in notice_text
    assert "resumed after step 2" in notice_text
    assert checkpoints(whole) == ["discarded", *names(1, 2, 3, 4)]
    for line, expected in zip(metrics(whole)[2:], before[2:], strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name


def start(arguments: list[str], sabotage: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments, torchrun=2, module="tests.support.sabotage"),
        cwd=ROOT,
        env={**environment(), "SABOTAGE": sabotage},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("kill-between-files", names(1, 2)),
        ("kill-before-state", [".step_000003.partial", *names(1, 2)]),
        ("kill-before-rename", [".step_000003.partial", *names(1, 2)]),
        ("kill-before-retention", names(1, 2, 3)),
    ],
)
def test_a_run_killed_during_a_save_resumes(
    quickstart_data: Path, whole: Path, tmp_path: Path, moment: str, left: list[str]
) -> None:
    arguments = settings(quickstart_data, tmp_path, "killed", "train.keep_checkpoints=2")
    process = start(arguments, f"{moment}:3")
    _, errors = process.communicate(timeout=500)
    assert process.returncode != 0
    entries = checkpoints(tmp_path / "killed")
    partial = ".step_000003.partial" in entries
    if moment == "kill-between-files":  # the controller is alive and may have removed the partial checkpoint
        entries = [name for name in entries if name != ".step_000003.partial"]
    assert entries == left, errors
    done = run(*arguments, "train.resume=auto", torchrun=2)
    assert done.returncode == 0, done.stderr
    assert checkpoints(tmp_path / "killed") == names(3, 4)
    notice_text = notices(tmp_path / "killed")
    assert ("step_000003 was still being written" in notice_text) == partial
    assert f"resumed after step {3 if left == names(1, 2, 3) else 2}" in notice_text
    again = metrics(tmp_path / "killed")
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert without_times(again)[:2] == without_times(metrics(whole))[:2]


@pytest.mark.slow
def test_sigterm_waits_for_the_checkpoint_in_progress(quickstart_data: Path, tmp_path: Path) -> None:
    process = start(
        settings(
            quickstart_data, tmp_path, "stopped", "train.save_every=3", "train.steps=500", "train.grace_seconds=0"
        ),
        "slow:3",
    )
    partial = tmp_path / "stopped" / "checkpoints" / ".step_000003.partial" / "trainer"
    deadline = time.monotonic() + 300
    while not (partial.is_dir() and len(list(partial.glob("*.safetensors"))) == 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    notice_text = notices(tmp_path / "stopped")
    assert "waiting for the checkpoint" in notice_text and "step_000003 was completed before the end" in notice_text
    assert checkpoints(tmp_path / "stopped") == names(3)
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_leaves_whole_checkpoints(quickstart_data: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        arguments = settings(quickstart_data, disk, "full", "train.keep_checkpoints=100", "train.steps=100")
        done = run(*arguments, torchrun=2)
        assert done.returncode != 0
        assert "bytes" in done.stderr and str(disk) in done.stderr and "free" in done.stderr, done.stderr
        left = checkpoints(disk / "full")
        assert left and all(not name.startswith(".") for name in left), left
        subprocess.run(["mount", "-o", "remount,size=400m", str(disk)], check=True)
        step = int(left[-1].removeprefix("step_"))
        again = run(*arguments, "train.resume=auto", f"train.steps={step + 1}", torchrun=2)
        assert again.returncode == 0, again.stderr
        assert checkpoints(disk / "full") == [*left, f"step_{step + 1:06d}"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
