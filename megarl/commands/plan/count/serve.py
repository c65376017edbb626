"""Server loop of the counting processes: requests on standard input, results on standard output, one JSON object a line.

The process imports slow modules once. Each request runs in a fork, since Megatron and vLLM allow one layout per process.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(answer: Answer, processes: int, module: str) -> None:
    """Answer requests, in any order, with up to `processes` forks at a time. End of input ends this process. `module` is
    imported before the forks."""
    warnings.simplefilter("ignore")  # warnings about models, which are neither trained nor run here
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # libraries print to stderr instead
    questions, sys.stdin = sys.stdin, None  # a fork closes its sys.stdin and would block on it
    importlib.import_module(module)
    lock = threading.Lock()

    def handle(question: dict[str, Any]) -> None:
        try:
            result = _in_a_fork(answer, question)
        except Exception:  # noqa: BLE001 - the client receives the traceback, e.g. if no process can be started
            result = {"failed": traceback.format_exc()[-4000:]}
        with lock:
            print(json.dumps({"number": question["number"], **result}), file=answers, flush=True)

    workers = ThreadPoolExecutor(processes)
    for line in questions:
        workers.submit(handle, json.loads(line))
    for fork in multiprocessing.active_children():
        fork.kill()  # its result is no longer needed
    os._exit(0)  # skips requests that still wait for a worker


def _in_a_fork(answer: Answer, question: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    fork = context.Process(target=_send, args=(sender, answer, question), daemon=True)
    fork.start()
    sender.close()
    try:
        return dict(receiver.recv())
    except (EOFError, OSError):  # it ended before it sent the whole answer
        fork.join()
        return {"failed": f"its process ended with status {fork.exitcode}"}
    finally:
        fork.join()
        receiver.close()


def _send(sender: Connection, answer: Answer, question: dict[str, Any]) -> None:
    try:
        sender.send({"answer": answer(question)})
    except Exception:  # noqa: BLE001 - the client receives the traceback
        sender.send({"failed": traceback.format_exc()[-4000:]})
