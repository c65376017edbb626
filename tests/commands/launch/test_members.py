"""Nodes that receive a signal: node rank 0 lets them leave, or ends the run."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.process import free_port
from megarl.commands.launch import members, multinode
from megarl.commands.launch.members import Members, NoAnswer, NodeRelease
from megarl.commands.launch.rendezvous import RendezvousClient, RendezvousServer
from megarl.errors import InputError
from tests.support.cluster_workers import wait_until


class Ended(Exception):
    """The run ends."""


def end() -> None:
    raise Ended


class Release:
    """Answers of a run; None: it does not answer."""

    seconds = 90.0

    def __init__(self, *answers: list[str] | str | None) -> None:
        self.answers, self.asked = list(answers), list[int]()

    def engines_left(self, rank: int, since: float) -> list[str] | str:
        self.asked.append(rank)
        answer = self.answers.pop(0)
        if answer is None:
            raise NoAnswer("it is busy")
        return answer


@pytest.fixture
def nodes():
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 2, "secret")
    client = RendezvousClient("127.0.0.1", port, 1, 2, timeout=5, secret="secret")
    assert wait_until(lambda: server.absent() == [], 5)
    server.open()
    server.begin()
    yield server, client
    client.close()
    server.finish(0)


def test_both_ends_notice_a_machine_without_power(nodes: Any) -> None:
    server, client = nodes
    connections = [server._present[1][0], client._connection]
    for name, value in [("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000)]:
        option = getattr(socket, name)
        assert [each.getsockopt(socket.IPPROTO_TCP, option) for each in connections] == [value, value], name
    assert all(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for each in connections)


def test_a_node_leaves_when_its_engines_have(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_ASK_SECONDS", 0.0)
    server, client = nodes
    notices: list[str] = []
    release: Any = Release(["engine1", "engine2"], ["engine2"], [])
    watch = Members(server, release, notices.append, end).watch
    watch()
    assert release.asked == [] and notices == []
    client.request_end()
    assert wait_until(lambda: server.ending() == [1], 5)
    watch()
    watch()
    assert notices == ["node rank 1 received a signal to end: the run goes on, and engine1, engine2 leave"]
    assert not client.over
    watch()
    assert wait_until(lambda: client.released and client.over, 5)
    client.close()
    assert wait_until(lambda: server.absent() == [1], 5)
    watch()
    watch()
    assert notices[1:] == ["node rank 1 has left"] and release.asked == [1, 1, 1]


def test_a_node_that_ends_before_its_release_has_left(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is not asked again: Ray may have lost the machine by then."""
    monkeypatch.setattr(members, "_ASK_SECONDS", 0.0)
    server, client = nodes
    notices: list[str] = []
    release: Any = Release(["engine1"], "trainers are on it")
    watch = Members(server, release, notices.append, end).watch
    client.request_end()
    assert wait_until(lambda: server.ending() == [1], 5)
    watch()
    client.close()
    assert wait_until(lambda: server.absent() == [1], 5)
    watch()
    assert server.ending() == [] and release.asked == [1] and notices[1:] == ["node rank 1 has left"]


def test_a_run_that_needs_the_node_ends(nodes: Any) -> None:
    server, client = nodes
    notices: list[str] = []
    release: Any = Release("trainers are on it")
    client.request_end()
    assert wait_until(lambda: server.ending() == [1], 5)
    with pytest.raises(Ended):
        Members(server, release, notices.append, end).watch()
    assert notices == ["node rank 1 received a signal to end, which ends the run: trainers are on it"]


def test_a_run_that_does_not_answer_is_asked_again(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the member's time is over: the controller may be busy for a while, or have finished."""
    monkeypatch.setattr(members, "_ASK_SECONDS", 0.0)
    server, client = nodes
    notices: list[str] = []
    release: Any = Release(None, None, ["engine1"], None, None)
    client.request_end()
    assert wait_until(lambda: server.ending() == [1], 5)
    watch = Members(server, release, notices.append, end).watch
    for seconds in (90.0, 0.0, 90.0, 90.0):  # 0: the command of a run that has finished still needs time to end
        release.seconds = seconds
        watch()
    assert notices == ["node rank 1 received a signal to end: the run goes on, and engine1 leave"]
    now = time.monotonic()
    monkeypatch.setattr(members.time, "monotonic", lambda: now + 91)
    with pytest.raises(Ended):
        watch()
    assert notices[1:] == [
        "node rank 1 received a signal to end, which ends the run: the run has not answered since. it is busy"
    ]


def test_the_run_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    questions: list[Any] = []
    answers: list[Any] = [{"engines": ["engine1"]}, {"refused": "no"}]
    answers += [InputError("no run is alive"), RuntimeError("its answer failed")]

    def ask(directory: Path, words: list[str]) -> dict[str, Any]:
        questions.append((directory, words))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr("megarl.commands.engines.command.ask", ask)
    release, now = NodeRelease(tmp_path, 90.0), time.monotonic()
    assert [release.engines_left(1, now), release.engines_left(1, now - 50)] == [["engine1"], "no"]
    for text in ("no run is alive", "its answer failed"):
        with pytest.raises(NoAnswer, match=text):
            release.engines_left(1, now - 100)
    assert questions == [(tmp_path, ["leave", "1", seconds]) for seconds in ("90", "40", "0", "0")]
    assert NodeRelease(None, 0.0).engines_left(1, now) == "the command is not a training run"


def test_the_run_of_a_recipe_is_known(tmp_path: Path) -> None:
    task = multinode._task(["recipes/quickstart.yaml", f"runs_dir={tmp_path}", "name=mine", "train.grace_seconds=40"])
    assert task.release == NodeRelease(tmp_path / "mine", 40.0)
    assert multinode._task(["--", "true"]).release.directory is None


def test_a_member_waits_for_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, until its engines have left; then its Ray ends and the node's exit status is 0."""
    released = threading.Event()

    class Client:
        status, refusal, begun, left = None, None, True, False

        @property
        def released(self) -> bool:
            return released.is_set()

        @property
        def over(self) -> bool:
            return self.released

        def request_end(self) -> None:
            threading.Timer(0.3, released.set).start()

    calls = iter([True, False])

    def wait(*arguments: Any) -> None:
        if next(calls):
            raise multinode._Interrupted(15)
        assert wait_until(released.is_set, 5)

    monkeypatch.setattr(multinode, "_wait_until_over", wait)
    monkeypatch.setattr(multinode, "ray_command", lambda *_: ["sleep", "60"])
    topology: Any = type("Topology", (), {"node_rank": 1, "is_head": False})
    client: Any = Client()
    began = time.monotonic()
    assert multinode._stay_in_ray(topology, "cpu", {}, client) is None
    assert multinode._report_end(topology, client) == 0 and time.monotonic() - began < 20
