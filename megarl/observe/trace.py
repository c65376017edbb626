"""trace.json: spans of phases and calls, for https://ui.perfetto.dev or chrome://tracing.

The format is Chrome's "JSON array": one event per line, each followed by a comma. Viewers accept a file without the
closing bracket, so the trace of a live or killed run can be opened too. A closed file is valid JSON. A resumed run appends
to the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.atomic_files import AppendFile
from megarl.observe.json_lines import json_line


class Trace:
    """Appends complete spans. A track is a (process, thread) pair of names; new tracks get increasing ids.

    Times are in seconds since the epoch (``time.time()``), in the file in microseconds.
    """

    def __init__(self, path: Path) -> None:
        continued = _prepare_to_append(path)
        self._tracks = _known_tracks(path) if continued else {}
        self._guard = threading.Lock()
        self._file = AppendFile(path)
        if not continued:
            self._file.write(b"[\n")

    def add(self, name: str, process: str, thread: str, began: float, seconds: float, **args: Any) -> None:
        """Append a finished span: `name` ran on `process` / `thread` from `began` for `seconds`."""
        with self._guard:
            pid, tid = self._track(process, thread)
            span = {"name": name, "ph": "X", "ts": round(began * 1e6, 1), "dur": round(seconds * 1e6, 1)}
            self._event({**span, "pid": pid, "tid": tid, "args": args})

    @contextlib.contextmanager
    def span(self, name: str, process: str, thread: str, **args: Any) -> Iterator[None]:
        """Trace the block as a span, written when the block ends, also on an exception."""
        began, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(name, process, thread, began, time.perf_counter() - clock, **args)

    def close(self) -> None:
        """Finish the file, so that it is valid JSON."""
        with self._guard:
            end = {"name": "closed", "ph": "i", "s": "g", "ts": round(time.time() * 1e6, 1), "pid": 0, "tid": 0}
            self._file.write(json_line(end) + b"]\n")
            self._file.close()

    def _track(self, process: str, thread: str) -> tuple[int, int]:
        if (process, thread) not in self._tracks:
            processes = {traced: ids[0] for (traced, _), ids in self._tracks.items()}
            if process not in processes:
                processes[process] = len(processes) + 1
                self._event(_naming("process_name", process, processes[process], 0))
            tid = len(self._tracks) + 1
            self._event(_naming("thread_name", thread, processes[process], tid))
            self._tracks[process, thread] = (processes[process], tid)
        return self._tracks[process, thread]

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(json_line(event)[:-1] + b",\n")


def _naming(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _prepare_to_append(path: Path) -> bool:
    """Prepare an earlier session's file for more events. Returns False without an earlier file."""
    if not path.exists() or path.stat().st_size < 2:
        path.unlink(missing_ok=True)
        return False
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - 65536)
        file.seek(start)
        tail = file.read()
        if tail.endswith(b"\n]\n"):  # closed: the last event lacks its comma
            file.truncate(size - len(b"\n]\n"))
            file.seek(0, os.SEEK_END)
            file.write(b",\n")
        else:  # killed: drop a line that was cut short
            file.truncate(start + tail.rfind(b"\n") + 1)
    return True


def _known_tracks(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the ids of an earlier session's tracks, so that new ids are unique."""
    names = _track_names(path)
    return {(names[pid, 0], thread): (pid, tid) for (pid, tid), thread in names.items() if tid != 0}


def _track_names(path: Path) -> dict[tuple[int, int], str]:
    """Return the names of processes (tid 0) and threads by (pid, tid)."""
    names = {}
    with path.open("rb") as file:
        for line in file:
            if b'"ph": "M"' in line and (event := parse_event(line)) is not None:
                names[event["pid"], event["tid"]] = event["args"]["name"]
    return names


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None for the file's brackets and for damaged lines."""
    try:
        event = json.loads(line.rstrip(b",\r\n "))
    except ValueError:  # a bracket, or a line cut short by the window or by a crash
        return None
    return event if isinstance(event, dict) else None
