"""Run directory, metrics.jsonl, samples and trace after a crash, on a full disk, and with a second run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from megarl.atomic_files import AppendFile, DiskFullError, write_atomically
from megarl.commands.data.tiny_weights import write_weights
from megarl.megatron.export import _Shards
from megarl.observe.json_lines import json_line
from megarl.observe.log import RunLog
from megarl.observe.metrics import MetricsLog, read_metrics
from megarl.observe.page.trace_tail import TraceTail
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import choose, discard_steps_after, read_samples, sample_steps, write_samples
from megarl.observe.trace import Trace
from tests.support.log_recipe import make_recipe

TINY = {
    "model_type": "qwen3", "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": True,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8, "initializer_range": 0.02,
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "64k") -> Iterator[Path]:
    """A file system of `size`."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system to fill: mount says {mounted.stderr.strip()!r} (needs root)")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# ---- metrics.jsonl


def test_floats_round_trip_exactly(run_dir: RunDirectory) -> None:
    draw = random.Random(0)
    floats = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(2000)]
    floats += [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, float(np.float32(0.1)), math.inf, -math.inf, math.nan]
    metrics = {f"m{i}": value for i, value in enumerate(floats)}
    metrics["big"] = 2**53 + 1
    log = MetricsLog(run_dir)
    log.write(1, metrics)
    log.close("finished")
    (line,) = read_metrics(run_dir.metrics)
    assert next(iter(line)) == "step"
    assert line["big"] == 2**53 + 1
    for name, value in metrics.items():
        if isinstance(value, float) and math.isnan(value):
            assert math.isnan(line[name])
        else:
            assert struct.pack("<d", line[name]) == struct.pack("<d", value)


def test_lines_are_strict_json_with_nonfinite_numbers_as_text(run_dir: RunDirectory) -> None:
    MetricsLog(run_dir).write(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3), "e": True})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(run_dir.metrics.read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": "NaN", "b": "-Infinity", "c": 0.5, "d": 3, "e": 1}


def test_torn_last_line_is_dropped_and_writing_continues(run_dir: RunDirectory) -> None:
    log = MetricsLog(run_dir)
    log.write(1, {"a": 1.0})
    log.write(2, {"a": 2.0})
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 3, "a"')
    assert [line["step"] for line in read_metrics(run_dir.metrics)] == [1, 2]
    log = MetricsLog(run_dir)
    assert log.torn == b'{"step": 3, "a"'
    assert log.last_step == 2
    log.write(3, {"a": 3.0})
    assert read_metrics(run_dir.metrics) == [{"step": n, "a": float(n)} for n in (1, 2, 3)]


def test_an_invalid_line_of_metrics_is_named(run_dir: RunDirectory) -> None:
    run_dir.metrics.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 .*hello"):
        read_metrics(run_dir.metrics)


def test_truncate_keeps_earlier_lines_and_moves_the_later_ones(run_dir: RunDirectory) -> None:
    log = MetricsLog(run_dir)
    for step in range(6):
        log.write(step, {"a": step / 3})
    before = run_dir.metrics.read_bytes().splitlines(keepends=True)
    assert log.truncate_after(3) == 2
    assert run_dir.metrics.read_bytes() == b"".join(before[:4])
    assert run_dir.discarded_metrics.read_bytes() == b"".join(before[4:])
    log.write(4, {"a": 7.0})  # into the new file, not into the replaced file
    assert read_metrics(run_dir.metrics)[-1] == {"step": 4, "a": 7.0}
    log.truncate_after(2)
    assert [line["step"] for line in read_metrics(run_dir.discarded_metrics)] == [4, 5, 3, 4]


def test_merge_adds_only_to_the_last_line(run_dir: RunDirectory) -> None:
    log = MetricsLog(run_dir)
    log.write(1, {"a": 1.0})
    log.write(2, {"a": math.nan})
    log.merge(2, {"eval/pass@1": 0.5})
    log.write(3, {"a": 3.0})
    lines = read_metrics(run_dir.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0] == {"step": 1, "a": 1.0}
    assert math.isnan(lines[1]["a"]) and lines[1]["eval/pass@1"] == 0.5


# ---- a full disk


def test_full_disk_leaves_whole_lines_and_an_error_with_the_remedy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run_dir = RunDirectory(disk)
        (disk / "other").write_bytes(b"x" * 20_000)
        log = MetricsLog(run_dir)
        metrics = {f"metric/{i}": i / 7 for i in range(200)}
        with pytest.raises(DiskFullError) as caught:
            for step in range(1000):
                log.write(step, metrics)
        text = str(caught.value)
        assert str(run_dir.metrics) in text and "train.resume=auto" in text
        assert f"file system mounted at {disk}: 0 of 65,536 bytes free" in text
        data = run_dir.metrics.read_bytes()
        assert data.endswith(b"}\n"), "half a line was left behind"
        steps = [line["step"] for line in read_metrics(run_dir.metrics)]
        assert steps == list(range(len(steps))) and len(steps) > 5
        (disk / "other").unlink()
        log.write(len(steps), metrics)  # with free space, the same log continues
        assert len(read_metrics(run_dir.metrics)) == len(steps) + 1


def test_replacing_a_file_on_a_full_disk_keeps_the_old_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        write_atomically(disk / "summary.json", b"old")
        with pytest.raises(DiskFullError, match=r"summary\.json"):
            write_atomically(disk / "summary.json", b"x" * 100_000)
        assert (disk / "summary.json").read_bytes() == b"old"
        assert [path.name for path in disk.iterdir()] == ["summary.json"]


def test_samples_on_a_full_disk_name_their_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, pytest.raises(DiskFullError, match="step_000001"):
        write_samples(RunDirectory(disk), 1, [{"response": "x" * 200_000}], limit=1)


def test_the_summary_of_a_run_on_a_full_disk_has_status_failed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:

        def run() -> None:
            with RunLog(make_recipe(report=True), disk / "run", 1, 10) as log:
                log.step(1)
                with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
                    while other.write(b"x" * 4096):
                        pass
                log.add({f"metric/{number}": 1.0 for number in range(500)})
                log.step(2)

        with pytest.raises(DiskFullError, match=f"mounted at {disk}"):
            run()
        summary = json.loads((disk / "run" / "summary.json").read_text())
        assert summary["status"] == "failed" and "metrics.jsonl could not be written" in summary["error"]
        assert summary["steps"] == 1 and not (disk / "run" / ".reserve").exists()


def test_a_run_that_cannot_close_its_trace_has_status_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise DiskFullError(errno.ENOSPC, "no room for the trace")

    def run() -> None:
        with RunLog(make_recipe(), tmp_path, 1, 1) as log:
            log.step(1)
            monkeypatch.setattr(log.trace, "close", full)

    with pytest.raises(DiskFullError, match="no room for the trace"):
        run()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "no room for the trace" in summary["error"]
    assert RunDirectory(tmp_path).holder() is None, "the directory is free for the next run"


def test_a_run_without_room_for_its_summary_does_not_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as disk:
        with pytest.raises(DiskFullError, match="reserve"):
            RunLog(make_recipe(), disk / "run", 1, 10)
        assert not (disk / "run" / ".reserve").exists()


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_get_the_permissions_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    old = os.umask(mask)
    try:
        write_atomically(tmp_path / "whole", b"x")
        _Shards(tmp_path).write(iter([("weight", torch.zeros(2))]))
        write_weights(tmp_path / "tiny.safetensors", TINY, 0, 0.1)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("whole", "model.safetensors", "tiny.safetensors"), mode)


def test_other_errors_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        AppendFile(tmp_path)


# ---- the lock


_SECOND = "import sys; from megarl.observe.run_dir import RunDirectory; RunDirectory(sys.argv[1]).lock(); {then}"


def _python(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_a_second_run_is_refused_with_the_first_runs_process(tmp_path: Path) -> None:
    first = _python(_SECOND.format(then="print('held', flush=True); sys.stdin.read()"), tmp_path)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        second = RunDirectory(tmp_path)
        with pytest.raises(ValueError, match=rf"process {first.pid} on {os.uname().nodename}"):
            second.lock()
        holder = second.holder()
        assert holder is not None and holder["pid"] == first.pid
    finally:
        first.kill()
        first.communicate()
    assert second.holder() is None, "a killed run holds nothing"
    assert second.lock() is None
    assert second.lock() is None, "a process may lock its run twice"
    refused = _python(_SECOND.format(then="print('held')"), tmp_path)
    _, errors = refused.communicate(timeout=60)
    assert refused.returncode != 0 and f"process {os.getpid()}" in errors
    second.unlock()
    assert RunDirectory(tmp_path).lock() is None


def test_a_reader_that_looks_at_the_lock_does_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`holder` of another process has a shared lock for a moment."""
    run = RunDirectory(tmp_path)
    run.lock()
    run.unlock()
    reader = os.open(tmp_path / "run.lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            fcntl.flock(reader, fcntl.LOCK_UN)

    monkeypatch.setattr("megarl.observe.run_dir.time.sleep", pause)
    assert run.lock() is None and len(pauses) == 2
    os.close(reader)


def test_has_results(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new")
    assert not run.has_results() and not run.is_run_directory()
    run.lock()
    run.checkpoints.mkdir()
    assert not run.has_results(), "an empty folder is not a run"
    (run.checkpoints / "step_000001").mkdir()
    assert run.has_results()


def test_earlier_recipes_are_kept(run_dir: RunDirectory) -> None:
    for text in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"):
        run_dir.write_recipe(text)
    assert run_dir.recipe.read_text() == "a: 3\n"
    assert (run_dir.path / "recipe.resolved.1.yaml").read_text() == "a: 1\n"
    assert (run_dir.path / "recipe.resolved.2.yaml").read_text() == "a: 2\n"
    assert not (run_dir.path / "recipe.resolved.3.yaml").exists()


# ---- samples


def test_samples_with_unusual_text_and_numbers_round_trip(run_dir: RunDirectory) -> None:
    odd = {
        "response": "line\u2028 \ud800 é\n\x00",
        "reward": np.float32(0.5),
        "ground_truth": np.array(["72"]),
        "x": {1},
    }
    write_samples(run_dir, 3, [odd], limit=5)
    (record,) = read_samples(run_dir, 3)
    assert record == {"response": odd["response"], "reward": 0.5, "ground_truth": ["72"], "x": "{1}"}


def test_whole_groups_are_chosen_evenly() -> None:
    records = [{"group": group, "index": i} for group in range(10) for i in range(4)]
    chosen = choose(records, 10)
    assert [record["group"] for record in chosen] == [0] * 4 + [5] * 4
    assert choose(records, 3) == records[:3]
    assert choose(records, 100) == records
    uneven = [{"group": 0}] * 9 + [{"group": 1}]
    assert len(choose(uneven, 5)) <= 5


def test_samples_of_discarded_steps_are_moved(run_dir: RunDirectory) -> None:
    for step in (1, 2, 3):
        write_samples(run_dir, step, [{"response": str(step)}], limit=1)
    assert discard_steps_after(run_dir.samples, 1) == 2
    assert sample_steps(run_dir) == [1]
    assert sorted(path.name for path in (run_dir.samples / "discarded").iterdir()) == [
        "step_000002.jsonl",
        "step_000003.jsonl",
    ]


# ---- trace.json


def test_closed_trace_is_json_and_is_extended_after_a_resume(run_dir: RunDirectory) -> None:
    trace = Trace(run_dir.trace)
    trace.add("gen", "controller", "main", 100.0, 2.5, step=1)
    trace.add("generate", "engine 0", "rank 0", 100.5, 1.0)
    trace.close()
    json.loads(run_dir.trace.read_text())
    trace = Trace(run_dir.trace)
    trace.add("update", "trainers", "rank 0", 104.0, 1.0)
    trace.add("gen", "controller", "main", 105.0, 2.5, step=2)
    trace.close()
    events = json.loads(run_dir.trace.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans[:2]] == [
        ("gen", 1e8, 2.5e6),
        ("generate", 1.005e8, 1e6),
    ]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    tracks = [(named[span["pid"], 0], named[span["pid"], span["tid"]]) for span in spans]
    assert tracks == [("controller", "main"), ("engine 0", "rank 0"), ("trainers", "rank 0"), ("controller", "main")]
    assert len([event for event in events if event["ph"] == "M"]) == 6, "a track is named once, whatever the session"


@pytest.mark.parametrize("torn", [b"", b'{"name": "half'])
def test_killed_trace_loads_and_is_extended(run_dir: RunDirectory, torn: bytes) -> None:
    trace = Trace(run_dir.trace)
    trace.add("gen", "controller", "main", 100.0, 2.5)
    with run_dir.trace.open("ab") as file:
        file.write(torn)
    assert [span["name"] for span in TraceTail(run_dir.trace).spans()] == ["gen"]
    again = Trace(run_dir.trace)
    again.add("update", "controller", "main", 103.0, 1.0)
    again.close()
    names = [event["name"] for event in json.loads(run_dir.trace.read_text()) if event["ph"] == "X"]
    assert names == ["gen", "update"]


def test_span_is_written_when_the_block_fails(run_dir: RunDirectory) -> None:
    trace = Trace(run_dir.trace)
    with pytest.raises(RuntimeError), trace.span("gen", "controller", "main"):
        raise RuntimeError
    assert [span["name"] for span in TraceTail(run_dir.trace).spans()] == ["gen"]


def test_json_line_has_no_inner_line_break() -> None:
    assert json_line({"a": "x\ny\r\n"}).count(b"\n") == 1
