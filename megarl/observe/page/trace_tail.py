"""The newest spans of a run's trace, read as they are appended."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from megarl.observe.page.followed_file import FollowedFile
from megarl.observe.trace import parse_event

TAIL = 4 << 20  # bytes read at the first look
MAX_SPANS = 20_000
_NAMING = b'"ph": "M"'


class TraceTail:
    """The last spans of trace.json, with the names of their process and thread.

    The names of tracks may stand anywhere in the file. The first call searches the whole file for them, without parsing the rest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = FollowedFile(path)
        self._names: dict[tuple[int, int], str] = {}
        self._spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self._started = False

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans, oldest first."""
        if not self._started and self._path.exists():
            self._started = True
            self._file.start_at(self._find_names())
        if self._file.has_changed():
            appended = self._file.read()
            if appended.replaced:
                self._names.clear()
                self._spans.clear()
            for line in appended.lines:
                self._add(line)
        return [
            {
                **span,
                "process": self._names.get((span["pid"], 0), str(span["pid"])),
                "thread": self._names.get((span["pid"], span["tid"]), str(span["tid"])),
            }
            for span in self._spans
        ]

    def _find_names(self) -> int:
        """Read the names of tracks in all but the last `TAIL` bytes. Returns the offset of the first line after these."""
        end, offset = self._path.stat().st_size - TAIL, 0
        with self._path.open("rb") as file:
            while offset < end:
                line = file.readline()
                offset += len(line)
                if _NAMING in line:
                    self._add(line)
        return offset

    def _add(self, line: bytes) -> None:
        event = parse_event(line)
        if event is None or not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            return
        args = event["args"] if isinstance(event.get("args"), dict) else {}
        if event.get("ph") == "M" and isinstance(args.get("name"), str):
            self._names[event["pid"], event["tid"]] = args["name"]
        elif event.get("ph") == "X" and all(isinstance(event.get(key), (int, float)) for key in ("ts", "dur")):
            self._spans.append({**event, "name": str(event.get("name")), "args": args})
