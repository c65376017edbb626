"""`megarl convert-weights` after kills and Ctrl-C, next to another conversion, and after changed files."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.convert_weights import command as convert_weights
from megarl.commands.convert_weights.command import convert
from megarl.commands.convert_weights.shards import ShardJob, ShardResult, convert_shard
from megarl.errors import InputError


def interrupted(job: ShardJob) -> ShardResult:
    """Die in the second file, with part of it written."""
    if job.target.name.startswith("model-00002"):
        first = job.target.with_name("model-00001-of-00003.safetensors")
        while not (first.exists() and "00001" in (job.target.parent / "conversion.megarl.json").read_text()):
            time.sleep(0.01)
        job.target.with_name(f".{job.target.name}.partial").write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    return convert_shard(job)


def test_a_killed_conversion_resumes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    convert(model, whole, workers=1)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a worker process was killed"):
        patched.setattr(convert_weights, "convert_shard", interrupted)
        convert(model, out, workers=2)
    assert not (out / "config.json").exists(), "an incomplete model has a config.json"
    assert not (out / "model-00002-of-00003.safetensors").exists()
    done = json.loads((out / "conversion.megarl.json").read_text())["files"]
    times = {name: (out / name).stat().st_mtime_ns for name in done}
    capsys.readouterr()
    convert(model, out, workers=1)
    assert times == {name: (out / name).stat().st_mtime_ns for name in done}, "complete files were written again"
    assert "of them" in capsys.readouterr().out and "model-00001-of-00003.safetensors" in done
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in out.iterdir()) and len(names) == 7
    for name in names:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_ctrl_c_prints_how_to_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second file is not begun; neither the lock nor an incomplete model remains."""
    real, calls = convert_shard, []

    def stop_at_the_second(job: ShardJob) -> ShardResult:
        calls.append(job.target.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(job)

    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(convert_weights, "convert_shard", stop_at_the_second)
        convert(model, out, workers=1)
    assert f"1 of 3 files are complete in {out}; the same command resumes" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["conversion.megarl.json", calls[0]]
    convert(model, out, workers=1)
    assert "1 file of them is already complete in" in capsys.readouterr().out and (out / "config.json").exists()


def test_concurrent_conversions_never_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call ends and removes its lock after the second has opened the same file: the second must hold a lock that
    blocks a third."""
    real, out = fcntl.flock, tmp_path / "out"
    first = convert_weights._locked(out)
    first.__enter__()
    with pytest.raises(InputError, match="another convert-weights is writing"), convert_weights._locked(out):
        pass

    def ends_meanwhile(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.__exit__(None, None, None)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", ends_meanwhile)
    with (
        convert_weights._locked(out),
        pytest.raises(InputError, match="another convert-weights is writing"),
        convert_weights._locked(out),
    ):
        pass
    assert list(out.iterdir()) == []


def test_files_that_a_concurrent_call_completed_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call held the lock while this call looked for an earlier conversion and found none."""
    real, out = convert_weights._locked, tmp_path / "out"

    def other_first(folder: Path) -> Any:
        monkeypatch.setattr(convert_weights, "_locked", real)
        convert(model, out, workers=1)
        monkeypatch.setattr(convert_weights, "convert_shard", lambda job: pytest.fail(f"{job.target} again"))
        return real(folder)

    monkeypatch.setattr(convert_weights, "_locked", other_first)
    convert(model, out, workers=1)


def test_a_file_truncated_after_the_conversion_is_converted_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(model, out, workers=1)
    file = out / "model-00003-of-00003.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    convert(model, out, workers=1)
    assert file.read_bytes() == data


def test_a_changed_source_is_refused(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", workers=1)
    file = model / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=f"changed since the conversion began: {file.name} differs"):
        convert(model, tmp_path / "out", workers=1)


@pytest.mark.slow
def test_the_processes_end_with_the_command(model: Path, tmp_path: Path) -> None:
    """SIGKILL of the command leaves no process; the same command then continues."""
    fifo = tmp_path / "out" / ".model-00001-of-00003.safetensors.partial"
    fifo.parent.mkdir()
    command = [
        sys.executable,
        "-m",
        "megarl",
        "convert-weights",
        str(model),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    (tmp_path / "out" / "conversion.megarl.json").write_text('{"files": {}}')
    os.mkfifo(fifo)  # opening it for writing blocks: a file that takes for ever
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        patience = time.monotonic() + 60
        while not (children := children_of(process.pid)) and time.monotonic() < patience:
            time.sleep(0.1)
        assert children
        time.sleep(1.0)
    finally:
        process.kill()
        process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < patience:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    fifo.unlink()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_first(model: Path, tmp_path: Path) -> None:
    """One process is writing a file. When the command has ended, the lock is free and no process writes."""
    fifo = tmp_path / "out" / ".model-00001-of-00003.safetensors.partial"
    fifo.parent.mkdir()
    (tmp_path / "out" / "conversion.megarl.json").write_text('{"files": {}}')
    os.mkfifo(fifo)
    command = [
        sys.executable,
        "-m",
        "megarl",
        "convert-weights",
        str(model),
        "--out",
        str(fifo.parent),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    patience = time.monotonic() + 60
    while not any("00003" in path.name for path in fifo.parent.glob("model*")) and time.monotonic() < patience:
        time.sleep(0.1)
    converting = [
        child for child in children_of(process.pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # and not Python's tracker of resources
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command resumes" in out and "stopped by Ctrl-C" in err, (out, err)
    assert len(converting) == 2 and not [child for child in converting if Path(f"/proc/{child}").exists()]


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
