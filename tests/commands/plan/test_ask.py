"""The rank subprocess: answers arrive in order of completion, failures reach the caller, and leaving ends it."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import wait

import pytest

from megarl.commands.plan.count import rank_client as module
from megarl.commands.plan.count.rank_client import RankClient, RankRequest
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


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(
        module.subprocess, "Popen", lambda arguments, **options: real([arguments[0], "-c", CHILD], **options)
    )


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
