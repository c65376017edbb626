"""The rank subprocess: answers arrive in order of completion, failures reach the caller, and leaving ends it."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import wait

import pytest

from megarl.commands.plan.count import rank_client as module
from megarl.commands.plan.count.rank_client import CannotCount, RankClient, RankRequest
from megarl.recipe.schema import Recipe

# A stand-in for child.py that repeats the request as its answer; rank 7 fails, rank 8 ends it, rank 9 takes long.
CHILD = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["rank"] == 8:
        sys.exit("out of memory")
    if asked["rank"] == 9:
        continue
    found = {"failed": "no such rank"} if asked["rank"] == 7 else {"answer": asked}
    print(json.dumps({"number": asked["number"], **found}), flush=True)
"""


# The server itself: no process can be started for rank 0, and the one for rank 1 ends while it sends its answer.
SERVER = """
import os, struct, sys
from multiprocessing.context import ForkProcess
from megarl.commands.plan.count import serve

def start(process, real=ForkProcess.start):
    if process._args[2]["rank"] == 0:
        raise OSError(11, "Resource temporarily unavailable")
    real(process)

def send(sender, answer, question):
    if question["rank"] == 1:
        os.write(sender.fileno(), struct.pack("!i", 100) + b"part")
        os._exit(9)
    sender.send({"answer": answer(question)})

ForkProcess.start, serve._send = start, send
serve.serve(dict, 2, "json")
"""


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(
        module.subprocess, "Popen", lambda arguments, **options: real([arguments[0], "-c", code], **options)
    )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, CHILD)


def test_a_rank_whose_process_cannot_start_or_dies_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run_instead(monkeypatch, SERVER)
    with RankClient() as client:
        refused, killed, good = (client.submit(RankRequest(Recipe(), rank)) for rank in range(3))
        with pytest.raises(CannotCount, match="Resource temporarily unavailable"):
            refused.result(timeout=60)
        with pytest.raises(CannotCount, match="ended with status 9"):
            killed.result(timeout=60)
        assert good.result(timeout=60)["rank"] == 2


def test_a_recipe_is_sent_once() -> None:
    recipe, other = Recipe(), Recipe()
    with RankClient() as client:
        futures = [client.submit(RankRequest(planned, 3, True)) for planned in (recipe, recipe, other)]
        first, second, third = (future.result() for future in futures)
    assert first["recipe"] == second["recipe"] != third["recipe"]
    assert (first["rank"], first["critic"], first["work"]) == (3, True, None)


def test_a_failed_request_does_not_fail_others() -> None:
    with RankClient() as client:
        bad, good = client.submit(RankRequest(Recipe(), 7)), client.submit(RankRequest(Recipe(), 0))
        assert good.result()["rank"] == 0
        with pytest.raises(RuntimeError, match="no such rank"):
            bad.result()


def test_the_end_of_the_process_fails_all_pending_requests_with_its_cause() -> None:
    with RankClient() as client:
        waiting, deadly = client.submit(RankRequest(Recipe(), 9)), client.submit(RankRequest(Recipe(), 8))
        for future in (waiting, deadly):
            with pytest.raises(RuntimeError, match="status 1:\nout of memory"):
                future.result(timeout=10)
        with pytest.raises(RuntimeError, match="status 1"):
            client.submit(RankRequest(Recipe(), 0)).result(timeout=10)


def test_leaving_does_not_wait_for_pending_requests() -> None:
    began = time.monotonic()
    with RankClient() as client:
        late = client.submit(RankRequest(Recipe(), 9))
        assert not wait([late], timeout=0.2).done
    assert time.monotonic() - began < 5
