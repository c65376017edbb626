"""``megarl doctor RUN_DIRECTORY``: a controller's answer, and directories without one. tests/runs/test_stalls.py has a real run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks import channel
from megarl.cluster.stacks.channel import socket_path
from megarl.cluster.stacks.live_run import answering_requests
from megarl.cluster.stacks.report import GroupStacks
from megarl.commands.doctor.command import doctor
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory


@pytest.fixture
def run_directory(tmp_path: Path):
    directory = RunDirectory(tmp_path / "mine")
    directory.lock()
    yield directory.path
    directory.unlock()


def show(directory: Path, **options: Any) -> int:
    return doctor(directory, [], as_json=options.get("as_json", False), nodes=None)


def state_of(*frames: str) -> Any:
    thread = {"name": "Main", "call": True, "frames": [*frames], "wait": None, "layer": 4, "backward": False}
    facts = {"problem": "", "state": "S", "io_bytes": 0, "cpu_ticks": 0, "digest": 1, "other_limit": False}
    return {**facts, "threads": [thread], "groups": [], "unfinished": []}


GROUPS = [
    GroupStacks("trainer", [ProcessInfo("trainer rank 0", "node7", 5)], [state_of("a.py:1 f")], "update_actor", 48.0),
    GroupStacks("critic", [ProcessInfo("critic rank 0", "node7", 6)], [state_of("a.py:1 f")]),
    GroupStacks("service", [ProcessInfo("service engine0", "node7", 7)], [state_of("b.py:2 g")]),
]


def test_the_controllers_answer_is_shown(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster: Any = SimpleNamespace(stacks=lambda: GROUPS)
    with answering_requests(cluster):
        assert show(run_directory) == 0
        text = capsys.readouterr().out
        assert show(run_directory, as_json=True) == 0
    first, *lines = text.splitlines()
    assert first == f"controller on {socket.gethostname()} (pid {os.getpid()})" and "  thread MainThread:" in lines
    assert any(line.endswith(" show_live_run") for line in lines)  # this test is the controller's main thread
    assert lines[lines.index("trainer processes (1): update_actor, for 48 s") :] == [
        "trainer processes (1): update_actor, for 48 s",
        "  running:",
        "    trainer rank 0 on node7 (pid 5): forward of layer 4",
        "      a.py:1 f",
        "critic processes (1): no call runs",
        "service engine0 on node7 (pid 7)",
        "  thread Main:",
        "    b.py:2 g",
    ]
    objects = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in objects] == ["controller", "trainer", "critic", "service"]
    assert objects[1]["stacks"][0]["threads"][0]["frames"] == ["a.py:1 f"]


def test_an_answer_that_fails_is_an_error(run_directory: Path) -> None:
    cluster: Any = SimpleNamespace(stacks=lambda: 1 / 0)
    with answering_requests(cluster), pytest.raises(RuntimeError, match=r"cannot read the stacks .*ZeroDivisionError"):
        show(run_directory)


def test_a_controller_that_hangs_is_named(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its socket accepts no request: the controller is stopped, or native code holds its lock."""
    monkeypatch.setattr("megarl.cluster.stacks.live_run.LIVE_RUN_SECONDS", 0.3)
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.3)
    monkeypatch.setenv("PATH", "")
    path = socket_path(os.getpid(), os.getuid())
    channel.private_directory(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert show(run_directory) == 0
    path.unlink()
    first, second = capsys.readouterr().out.splitlines()
    assert f"(pid {os.getpid()}): it has not answered within" in first and "py-spy is not installed" in second


def test_directories_without_a_run_that_can_be_reached(run_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run is alive in .*: no process has its run\.lock"):
        show(tmp_path)
    with pytest.raises(InputError, match=r"cannot be reached: .*No such file"):
        show(run_directory)
    (run_directory / "run.lock").write_text(json.dumps({"pid": 5, "host": "node7"}))
    with pytest.raises(InputError, match="is on node7: start the command there"):
        show(run_directory)
    with pytest.raises(InputError, match="takes only --json"):
        doctor(run_directory, ["train.steps=1"], as_json=False, nodes=None)
