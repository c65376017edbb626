"""``python -m megarl doctor RUN_DIRECTORY``: what each process of a live run does now, and who waits for whom."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks.channel import read_stacks
from megarl.cluster.stacks.live_run import read_live_run
from megarl.cluster.stacks.report import GroupStacks, lines_of, process_lines
from megarl.commands.live_controller import find_controller, unreachable


def show_live_run(directory: Path, *, as_json: bool) -> None:
    """Print the stacks of the run in `directory`. Raises InputError if no run lives there or its controller is elsewhere."""
    pid, user = find_controller(directory)
    try:
        groups = read_live_run(pid, user)
    except (FileNotFoundError, PermissionError) as error:
        raise unreachable(directory, pid, error) from error
    except (TimeoutError, ConnectionRefusedError, BlockingIOError):  # it hangs, too
        groups = [GroupStacks("controller", [ProcessInfo("controller", pid=pid)], read_stacks([pid], True))]
    print(
        json.dumps([asdict(group) for group in groups], indent=1) if as_json else "\n".join(text_of(groups)), flush=True
    )


def text_of(groups: list[GroupStacks]) -> list[str]:
    """Format the states of a run's processes."""
    lines = []
    for group in groups:
        if group.name in ("controller", "service"):
            for place, stacks in zip(group.places, group.stacks, strict=True):
                lines += process_lines(place, stacks)
        else:
            call = f"{group.call}, for {group.seconds:.0f} s" if group.call else "no call runs"
            lines += [f"{group.name} processes ({len(group.places)}): {call}"]
            lines += [f"  {line}" for line in lines_of(group)]
    return lines
