"""Filters of samples and groups."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.json_lines import json_line
from megarl.observe.page.sample_pages import SETTLED, SampleFiles, SampleFilter, sample_page
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import sample_path, write_samples

RECORDS: list[dict[str, Any]] = [
    {"group": 1, "index": 0, "reward": 1.0, "data_source": "a", "finish_reason": "stop", "response": "Yes", "staleness": 0},
    {"group": 1, "index": 1, "reward": 0.0, "data_source": "a", "finish_reason": "length", "response": "no", "staleness": 2},
    {"group": 2, "index": 0, "reward": 0.5, "data_source": "b", "finish_reason": "stop", "response": "x", "staleness": 1,
     "turns": [{"role": "tool", "name": "search", "arguments": {"query": "YESTERDAY"}, "text": "?"}], "tool_use": {"calls": 1, "failures": 0}},
    {"group": 2, "index": 1, "reward": 0.5, "data_source": "b", "finish_reason": "stop", "response": "y", "reason": "yes",
     "tool_use": {"calls": 2, "failures": 1}},
    {"group": 3, "index": 0, "reward": "NaN", "data_source": "a", "finish_reason": "turns", "response": ""},
]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    write_samples(directory, 1, RECORDS, 100)
    return directory


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["1/0", "1/1", "2/0", "2/1", "3/0"]),
        ({"least": 0.5}, ["1/0", "2/0", "2/1"]),
        ({"most": 0.5}, ["1/1", "2/0", "2/1"]),
        ({"least": 0.4, "most": 0.6}, ["2/0", "2/1"]),
        ({"source": "b"}, ["2/0", "2/1"]),
        ({"finish": "length"}, ["1/1"]),
        ({"text": "yes"}, ["1/0", "2/0", "2/1"]),
        ({"tools": "called"}, ["2/0", "2/1"]),
        ({"tools": "failed"}, ["2/1"]),
        ({"spread": "some"}, ["1/0", "1/1"]),
        ({"spread": "none"}, ["2/0", "2/1", "3/0"]),
        ({"staleness": 1}, ["1/1", "2/0"]),
        ({"spread": "none", "text": "yesterday", "finish": "stop"}, ["2/0"]),
    ],
)
def test_filters(run_dir: RunDirectory, conditions: dict[str, Any], expected: list[str]) -> None:
    page = sample_page(run_dir, [1], (1, 0), SampleFilter(**conditions))
    assert [f"{group['group']}/{sample['index']}" for group in page.groups for sample in group["samples"]] == expected
    assert page.looked_at == 5 and page.next is None
    for group in page.groups:
        assert len(group["rewards"]) == (1 if group["group"] == 3 else 2), "of all samples of the group"


def test_pages_go_back_in_time_and_each_sample_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.observe.page.sample_pages.PAGE", 3)
    run_dir = RunDirectory(tmp_path)
    for step in (1, 2, 4):
        write_samples(run_dir, step, RECORDS, 100)
    seen, start = [], (3, 0)
    while True:
        page = sample_page(run_dir, [1, 2, 4], start, SampleFilter())
        seen += [(group["step"], group["group"], len(group["samples"])) for group in page.groups]
        if page.next is None:
            break
        start = page.next
    assert seen == [(2, 1, 2), (2, 2, 2), (2, 3, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1)]


def test_the_folder_is_listed_again_only_if_it_has_changed(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SampleFiles(run_dir)
    assert files.steps() == [1]
    past = time.time() - 10 * SETTLED
    os.utime(run_dir.samples, (past, past))
    assert files.steps() == [1]
    listed: list[Path] = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or iterdir(path))  # type: ignore[func-returns-value]
    assert files.steps() == [1] and not listed
    sample_path(run_dir, 12).write_bytes(json_line(RECORDS[0]))
    (run_dir.samples / "step_x.jsonl").touch()
    assert files.steps() == [1, 12] and listed


def test_a_file_that_disappears_is_named(run_dir: RunDirectory) -> None:
    page = sample_page(run_dir, [1, 2], (2, 0), SampleFilter())
    assert page.damaged == ["step_000002.jsonl has been removed while it was read."] and len(page.groups) == 3
