"""One process of a machine compiles a MindSpeed operator at a time; a killed process does not block the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.platform.mindspeed.build_lock import build_in_turn, separate_build_folder


class Builder:
    """A builder that compiles for `seconds` and logs begin and end."""

    name = "fused"

    def __init__(self, log: Path, seconds: float) -> None:
        self.log, self.seconds = log, seconds

    def load(self, verbose: bool = True) -> str:
        lock = Path(os.environ["TORCH_EXTENSIONS_DIR"], self.name, "lock")
        assert not lock.exists(), "torch would wait for a process that has died"
        lock.touch()
        self._note("begin")
        time.sleep(self.seconds)
        self._note("end")
        lock.unlink()
        return f"{self.name} of {os.getpid()}"

    def _note(self, event: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{event} {os.getpid()}\n")


def rank(log: Path, seconds: float) -> None:
    build_in_turn(Builder)
    builder = Builder(log, seconds)
    assert builder.load() == builder.load(verbose=False), "it is used many times, and loaded once"


def test_ranks_build_one_at_a_time_and_a_killed_rank_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    log, fork = tmp_path / "log", multiprocessing.get_context("fork")
    import torch.utils.cpp_extension  # noqa: F401 -- once, before the processes are forked

    victim: Any = fork.Process(target=rank, args=(log, 60))
    victim.start()
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting = [fork.Process(target=rank, args=(log, 0.1)) for _ in range(3)]
    for process in waiting:
        process.start()
    time.sleep(0.3)
    assert len(log.read_text().splitlines()) == 1, "a second rank compiles at the same time as the first"
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for process in [victim, *waiting]:
        process.join(60)
    assert [process.exitcode for process in waiting] == [0, 0, 0]
    events = [line.split() for line in log.read_text().splitlines()[1:]]
    assert [event for event, _ in events] == ["begin", "end"] * 3
    assert [pid for _, pid in events[::2]] == [pid for _, pid in events[1::2]]


def test_the_locks_name_does_not_make_mindspeed_remove_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """MindSpeed removes the folder of all extensions where a file in it has a name that ends in `lock`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    rank(tmp_path / "log", 0)
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name.endswith("lock")]


def test_machines_with_a_shared_home_build_in_separate_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of another node may not be seen, so the file of a process that compiles there would be taken for a dead one's."""
    folders = []
    for host in ("node1", "node2"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        separate_build_folder()
        folders.append(os.environ["TORCH_EXTENSIONS_DIR"])
    assert folders[0] != folders[1] and "node2" in folders[1]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/opt/torch_extensions")
    separate_build_folder()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/opt/torch_extensions", "an image's own folder stays"
