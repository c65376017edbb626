"""CPU time and memory of a command with all its descendants, sampled while it runs."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarl.cluster.process import die_with_parent

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
CPU_EVERY, MEMORY_EVERY = 0.2, 1.0  # seconds


@dataclass
class Usage:
    """Usage of a process tree.

    begun: time of the command; times: of the samples, in ascending order; cpu: CPU seconds since `begun` at these times;
    peak: largest sum of the proportional set sizes (PSS), in MiB; code: exit status, None at the time limit.
    """

    begun: float
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: float = 0.0
    code: int | None = None

    def cpu_at(self, moment: float) -> float:
        """Return the CPU seconds at `moment`, by the line between the two samples around it."""
        at = bisect.bisect_left(self.times, moment)
        if at == 0:
            return self.cpu[0] if self.cpu else 0.0
        if at == len(self.times):
            return self.cpu[-1]
        t0, t1, c0, c1 = *self.times[at - 1 : at + 1], *self.cpu[at - 1 : at + 1]
        return c0 + (c1 - c0) * (moment - t0) / (t1 - t0)


def descendants(root: int) -> dict[int, float]:
    """Return the CPU seconds of each descendant of process `root`, including its children that have been waited for."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    below, open_ends = dict[int, float](), [root]
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            below[child] = seconds[child]
            open_ends.append(child)
    return below


def memory(processes: Sequence[int]) -> float:
    """Return the sum of the proportional set sizes of `processes` in MiB; pages of several processes count once."""
    kib = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            kib += int(text.partition("\nPss:")[2].split()[0]) if "\nPss:" in text else 0
    return kib / 1024


def measure(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, limit: float) -> Usage:
    """Run `command` with its output in `log`, at most `limit` seconds, and return its usage. Ends all its descendants.

    This process is the parent of orphans meanwhile, so that daemons of the command count too. Start no other process meanwhile.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    earlier, before = descendants(os.getpid()).keys(), _waited_for()
    usage = Usage(time.time())
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # if this process ends before it
        )
        sampler = threading.Thread(target=_sample, args=(usage, before, earlier, process), daemon=True)
        sampler.start()
        try:
            usage.code = process.wait(limit)
        except subprocess.TimeoutExpired:
            usage.code = None
        finally:
            _end(_of_command(earlier))
            process.wait()
            sampler.join()
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return usage


def _share_cores_alike(processes: Iterable[int], seen: set[int]) -> None:
    """Give the sessions of new `processes` our autogroup's niceness, and add them to `seen`.

    Linux divides the cores among sessions (man 7 sched, autogroup). Otherwise sessions that the command starts would have the
    default niceness.
    """
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        nice = autogroup.read_text().split()[-1]
        for process in set(processes) - seen:
            seen.add(process)
            with contextlib.suppress(OSError):  # it has ended
                Path(f"/proc/{process}/autogroup").write_text(nice)


def _waited_for() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _of_command(earlier: Collection[int]) -> dict[int, float]:
    return {process: cpu for process, cpu in descendants(os.getpid()).items() if process not in earlier}


def _sample(usage: Usage, before: float, earlier: Collection[int], process: subprocess.Popen[bytes]) -> None:
    next_memory, seen = usage.begun, set[int]()
    while usage.code is None and process.poll() is None:
        below = _of_command(earlier)
        _share_cores_alike(below, seen)
        usage.times.append(time.time())
        usage.cpu.append(max([sum(below.values()) + _waited_for() - before, *usage.cpu[-1:]]))
        if time.time() >= next_memory:
            usage.peak = max(usage.peak, memory(list(below)))
            next_memory = time.time() + MEMORY_EVERY
        time.sleep(CPU_EVERY)


def _end(processes: Mapping[int, float]) -> None:
    """Kill `processes`, which descend from this process, and wait for its children among them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
