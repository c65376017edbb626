"""A message that cannot be unpickled fails its call, with the cause; the caller does not wait for ever."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import CallFailed, ServiceDied
from megarl.cluster.failures import Failure, ProcessInfo, Raised, Returned
from megarl.cluster.torchrun import rank as torchrun_rank
from megarl.cluster.torchrun.local_service import LocalService
from megarl.cluster.torchrun.peers import PeerRank
from megarl.cluster.torchrun.rank import CallMessage, RankWorker, StopMessage
from megarl.cluster.wire import UnreadableMessage, Wire


def refuse() -> None:
    raise ModuleNotFoundError("No module named 'only_there'")


class Unreadable:
    """Pickles, and does not unpickle, as an object of a module that the other process lacks."""

    def __reduce__(self) -> Any:
        return refuse, ()


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    ends = [Wire(end) for end in socket.socketpair(socket.AF_UNIX)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_the_next_message_can_be_read(wires: tuple[Wire, Wire]) -> None:
    wires[0].send(Unreadable())
    wires[0].send("next")
    with pytest.raises(UnreadableMessage, match="ModuleNotFoundError: No module named 'only_there'"):
        wires[1].receive()
    assert wires[1].receive() == "next"


def test_an_unreadable_answer_of_a_rank_is_a_failure_of_its_call(wires: tuple[Wire, Wire]) -> None:
    peer = PeerRank(wires[0], ProcessInfo("trainer rank 1"))
    wires[1].send(Returned(Unreadable()))
    wires[1].send(Returned(3))
    failure = peer.answers.get(timeout=10)
    assert isinstance(failure, Failure) and "only_there" in str(failure)
    assert peer.answers.get(timeout=10) == Returned(3) and peer.death is None


def test_a_rank_answers_an_unreadable_call_with_its_error(wires: tuple[Wire, Wire]) -> None:
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = threading.Thread(
        target=torchrun_rank._read_calls, args=(wires[0], messages, "trainer rank 1", 2), daemon=True
    )
    reader.start()
    wires[1].send(CallMessage("update", (Unreadable(),)))
    answer = RankWorker().answer(messages.get(timeout=10))
    assert isinstance(answer, Raised) and "only_there" in answer.traceback
    wires[1].send(StopMessage(now=False))
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize(("method", "arguments"), [("scaled", (Unreadable(),)), ("unreadable", ())])
def test_a_service_with_an_unreadable_call_or_answer_fails_all_its_calls(
    method: str, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    service = LocalService(
        "tests.cluster.test_unreadable_messages:Engine", (), name="engine0", log=tmp_path / "log", env={}
    )
    try:
        waiting = service.call("wait")
        with pytest.raises((ServiceDied, CallFailed), match="only_there"):
            service.call(method, *arguments).result(timeout=60)
        with pytest.raises(ServiceDied, match="only_there"):
            waiting.result(timeout=60)
    finally:
        service.stop()


class Engine:
    def scaled(self, value: Any) -> Any:
        return value

    def unreadable(self) -> Any:
        return Unreadable()

    async def wait(self) -> None:
        import asyncio

        await asyncio.Event().wait()


def test_the_socket_of_ranks_has_a_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun_rank.tempfile, "gettempdir", lambda: "/scratch/" + "x" * 90)
    path = torchrun_rank.socket_path()
    assert path.parts[:2] == ("/", "tmp") and path.name == "control"
    monkeypatch.setattr(torchrun_rank.tempfile, "gettempdir", lambda: "/scratch")
    assert torchrun_rank.socket_path().parts[:2] == ("/", "scratch")
