"""The newest spans of a trace that grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.observe.page import trace_tail
from megarl.observe.page.trace_tail import TraceTail
from megarl.observe.trace import Trace


def test_spans_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tail = TraceTail(path)
    assert tail.spans() == []
    trace = Trace(path)
    trace.add("gen", "controller", "MainThread", 1.0, 0.5, step=1)
    assert [(span["name"], span["ts"], span["dur"]) for span in tail.spans()] == [("gen", 1e6, 5e5)]
    trace.add("load", "engine0", "calls", 2.0, 0.25)
    with path.open("ab") as file:
        file.write(b'{"name": "half')
    (gen, load) = tail.spans()
    assert (gen["process"], gen["thread"], gen["args"]) == ("controller", "MainThread", {"step": 1})
    assert (load["name"], load["process"], load["dur"]) == ("load", "engine0", 250000.0)


def test_the_end_of_a_long_trace_has_the_names_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_tail, "TAIL", 1000)
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for number in range(100):
        trace.add("call", f"engine{number % 2}", "calls", float(number), 0.5, number=number)
    spans = TraceTail(path).spans()
    assert 3 < len(spans) < 20 and [span["args"]["number"] for span in spans] == list(range(100 - len(spans), 100))
    assert {span["process"] for span in spans} == {"engine0", "engine1"}


def test_strange_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '[\n{"ph": "X", "name": 3, "ts": 1, "dur": 2, "pid": 1, "tid": 2, "args": [1]},\n'
        '{"ph": "X", "ts": "a", "dur": 2, "pid": 1, "tid": 2},\n{"ph": "M", "pid": 1, "tid": 0, "args": {"name": 1}},\n'
        '{"ph": "X", "ts": 1, "dur": 2},\n[1],\n'
    )
    (span,) = TraceTail(path).spans()
    assert (span["name"], span["args"], span["process"]) == ("3", {}, "1")
