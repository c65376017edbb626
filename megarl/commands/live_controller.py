"""Find the controller of a live run, for commands that ask it something."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster.base import host_name
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory


def find_controller(directory: Path) -> tuple[int, int]:
    """Return process id and user of the controller of the run in `directory`. Raises InputError if no run lives there, or its
    controller is on another machine."""
    holder = RunDirectory(directory).holder()
    if holder is None:
        raise InputError(
            f"no run is alive in {directory}: no process has its run.lock. Give the directory of a run that trains now."
        )
    pid, host = holder.get("pid"), holder.get("host")
    if pid is None or host != host_name():
        raise InputError(
            f"the controller of the run in {directory} is on {host or 'another machine'}: start the command there."
        )
    return pid, (directory / "run.lock").stat().st_uid


def unreachable(directory: Path, pid: int, error: OSError) -> InputError:
    """Return the error of a command that cannot open the socket of the run's controller."""
    return InputError(
        f"the controller of the run in {directory} (pid {pid}) cannot be reached: {error}. Start the command in the same "
        "container and as the same user. A run answers once it has connected to its cluster."
    )
