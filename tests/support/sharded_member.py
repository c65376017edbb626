"""Ranks of tests/weight_sync/test_deaths.py in a separate process that dies or is stopped in the middle of an update.

Usage: python -m tests.support.sharded_member CASE. CASE is JSON: trainers and engines (the ranks in this process), session
(null if trainer 0 is here: the process prints it on stdout), shapes, and for the second update: place (an attribute of
megarl.weight_sync, for example "outgoing.OutgoingBuckets.send"), signal, before (strike before or after the call).
Reads the versions to update to from stdin.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

from megarl.weight_sync.session import Session
from tests.support.sharded_ranks import SHAPES, ShardedCluster, open_session


def arm(place: str, signal: int, before: bool) -> None:
    """Send `signal` to this process once, at `place`."""
    module, owner, name = place.rsplit(".", 2)
    cls = getattr(importlib.import_module(f"megarl.weight_sync.{module}"), owner)
    original = getattr(cls, name)

    armed = threading.Lock()

    def strike(now: bool) -> None:
        if now and armed.acquire(blocking=False):
            os.kill(os.getpid(), signal)

    def struck(*arguments: Any) -> Any:
        strike(before)
        result = original(*arguments)
        strike(not before)
        return result

    setattr(cls, name, struck)


def main() -> None:
    case = json.loads(sys.argv[1])
    SHAPES.update({name: tuple(shape) for name, shape in case["shapes"].items()})
    if case["session"] is None:
        session, store = open_session(case["shm_dir"], case["places"], **case["options"])
    else:
        session, store = Session.from_json(json.dumps(case["session"])), None
    cluster = ShardedCluster(session, store, case["trainers"], case["engines"])
    print(session.to_json(), flush=True)
    cluster.connect()
    for number, line in enumerate(sys.stdin):
        if number == 1 and case["place"]:
            arm(case["place"], case["signal"], case["before"])
        sending, receiving = cluster.start(int(line))
        for member in (*sending, *receiving):
            member.result()
        print("done", flush=True)


if __name__ == "__main__":
    main()
