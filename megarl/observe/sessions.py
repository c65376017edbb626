"""Sessions of a run, which are the starts of its command: the time that was lost in and between them, and the run's faults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import pluralize
from megarl.observe.console import clock
from megarl.platform.installed import differences, megarl_text, versions_text

_FAULTS = {"failure": ("failure",), "killed": ("kill",), "death": ("death", "deaths"), "rollback": ("rollback",)}
_LOST = {
    "start": "start",
    "repeated": "repeated steps",
    "recovery": "recovery",
    "dropped": "dropped steps",
    "other": "other",
}

Session = dict[str, Any]
"""An entry of `sessions` in summary.json: first_step, began, status, provenance; and, once they are known, start, ended and error."""
Line = Mapping[str, float]
"""A line of metrics.jsonl."""


def read_sessions(summary: Path, restarted_after: str) -> list[Session]:
    """Return the earlier sessions of a run. A session without a final status was killed.

    restarted_after: why `megarl train` has started the run again, which is the cause of a kill; "" if it has not.
    """
    if not summary.exists():
        return []
    sessions: list[Session] = json.loads(summary.read_text())["sessions"]
    for session in sessions:
        if session["status"] == "running":
            session["status"] = "killed"
            session["error"] = (restarted_after if session is sessions[-1] else "") or None
    return sessions


def effective_time(
    sessions: Sequence[Session], lines: Sequence[Line], discarded: Sequence[Line], end: float
) -> dict[str, float | None]:
    """Return the effective training time ratio (ETTR) of a run, and its seconds.

    lines: of metrics.jsonl. discarded: of metrics.discarded.jsonl. end: of the last session if it has not ended, in seconds
    since the epoch.

    ``wall``: since the first session began. ``productive``: of all steps in `lines`, each counted once. ``ratio``: productive
    over wall, None if no time has passed. The rest of wall is lost: ``start`` before the first step of each session;
    ``repeated`` in steps that a resume repeated; ``recovery`` while trainers or engines restarted and the run went on, and in
    rollbacks; ``dropped`` in steps that a rollback undid; ``other`` in steps that an end has cut off, between sessions, and after
    the last step.
    """
    wall = max(0.0, sessions[-1].get("ended", end) - sessions[0]["began"])
    steps = {(line["step"], line.get("timing_s/step", 0.0)) for line in discarded}  # a crash can write a line twice
    seconds = {
        "productive": productive_seconds(lines),
        "start": sum(map(_start_seconds, sessions)),
        "repeated": sum(seconds for _, seconds in steps),
        "recovery": sum(map(_recovery_seconds, lines)),
        "dropped": sum(map(step_seconds, lines)) - productive_seconds(lines),
    }
    ratio = min(1.0, seconds["productive"] / wall) if wall else None
    return {"ratio": ratio, "wall": wall, **seconds, "other": max(0.0, wall - sum(seconds.values()))}


def productive_seconds(lines: Sequence[Line]) -> float:
    """Return the total seconds of all steps that no rollback undid. lines: parsed lines of metrics.jsonl."""
    dropped = {
        line["step"] - earlier for line in lines for earlier in range(int(line.get("recovery/dropped_steps", 0)))
    }
    return sum(step_seconds(line) for line in lines if line["step"] not in dropped)


def step_seconds(line: Line) -> float:
    """Return the seconds of a step without those in which it waited for trainers or engines to restart, or for a rollback."""
    return max(0.0, line.get("timing_s/step", 0.0) - _recovery_seconds(line))


def _recovery_seconds(line: Line) -> float:
    return line.get("timing_s/recovery", 0.0) + line.get("fleet/restart_seconds", 0.0)


def _start_seconds(session: Session) -> float:
    """Return the seconds before the first step. A session that ended before it counts as a whole, if its end is known."""
    if "start" in session:
        return float(session["start"]["seconds"])
    return max(0.0, session.get("ended", session["began"]) - session["began"])


def faults(sessions: Sequence[Session], notices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sessions that failed or were killed, and the deaths and rollbacks in a run that went on, by time.

    notices: lines of notices.jsonl. Each fault has ``time`` (None: unknown), ``step`` (None: unknown), ``event`` (failure, killed,
    death or rollback) and ``cause`` (one line; None: unknown).
    """
    result = [
        {"time": note["time"], "step": note["step"], "event": note["event"], "cause": first_line(note["text"])}
        for note in notices
        if note.get("event") in ("death", "rollback")
    ]
    for index, session in enumerate(sessions):
        if session["status"] in ("failed", "killed"):
            event = "failure" if session["status"] == "failed" else "killed"
            following = sessions[index + 1]["began"] if index + 1 < len(sessions) else None
            cause = first_line(session["error"]) if session.get("error") else None
            time = session.get("ended", following)
            result.append({"time": time, "step": session.get("last_step"), "event": event, "cause": cause})
    return sorted(result, key=lambda fault: float("inf") if fault["time"] is None else fault["time"])


def time_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of a run's time and faults. summary: content of summary.json."""
    time = summary["ettr"]
    if time["ratio"] is None:
        return []
    lines = [("time", f"{time_text(time)}{_lost_text(time)}")]
    counts = Counter(fault["event"] for fault in summary["faults"])
    if counts:
        parts = ", ".join(pluralize(counts[event], *words) for event, words in _FAULTS.items() if counts[event])
        causes = [fault["cause"] for fault in summary["faults"] if fault["cause"]]
        lines.append(("faults", parts + (f"; the last: {causes[-1]}" if causes else "")))
    return lines


def time_text(time: Mapping[str, Any]) -> str:
    """Return the ratio of `effective_time` and the whole time: ``94.1 % of 3:02:11 in steps (ETTR)``."""
    return f"{100 * time['ratio']:.1f} % of {clock(time['wall'])} in steps (ETTR)"


def _lost_text(time: Mapping[str, Any]) -> str:
    parts = [f"{name} {clock(time[key])}" for key, name in _LOST.items() if time[key] >= 0.5]
    return f"; {', '.join(parts)}" if parts else ""


def provenance_lines(sessions: Sequence[Session]) -> list[tuple[str, str]]:
    """Return (label, text) of the last start's provenance; an empty list if it is unknown.

    Earlier starts have a line each if their installation was another one.
    """
    last = sessions[-1].get("provenance") if sessions else None
    if not last:
        return []
    lines = [("megarl", megarl_text(last)), ("Versions", versions_text(last.get("versions", {})))]
    for number, session in enumerate(sessions[:-1], start=1):
        earlier = session.get("provenance") or {}
        has_versions = "versions" in earlier
        changes = [f"with {name} {old}" for name, old, _ in differences(earlier, last)] if has_versions else ["unknown"]
        if changes:
            lines.append((f"Start {number}, step {session.get('first_step')}", ", ".join(changes)))
    lines.append(("System", str(last.get("system", "unknown"))))
    if "hosts" in last:
        lines += [("Hosts", hosts_text(last["hosts"])), ("Trainers' devices", devices_text(last["devices"]))]
    keys = {
        "Command": "command",
        "Folder": "folder",
        "Recipe's digest": "recipe",
        "Data's digest": "data",
        "Weights' digest": "weights",
    }
    return [*lines, *((label, str(last[key])) for label, key in keys.items() if key in last)]


def hosts_text(hosts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the machines of a run with their processes: ``node-1: 8 trainers, 2 engines; node-2: 8 trainers``."""
    parts = []
    for machine, roles in hosts.items():
        counts = ", ".join(pluralize(count, role.removesuffix("s")) for role, count in roles.items())
        parts.append(f"{machine}: {counts}")
    return "; ".join(parts)


def devices_text(devices: Mapping[str, Any]) -> str:
    """Return the trainers' devices: ``8 x NVIDIA H100 80GB HBM3 (cuda)``."""
    names = ", ".join(f"{count} x {name}" for name, count in devices["trainers"].items())
    return f"{names} ({devices['kind']})"


def first_line(text: str) -> str:
    """Return the first line; all lines as one if the first is only a heading, as in the errors of a recipe."""
    first = text.strip().split("\n", 1)[0].strip()
    return " ".join(text.split()) if first.endswith(":") else first
