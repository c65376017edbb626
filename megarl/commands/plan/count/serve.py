"""What the planner's processes are: questions from standard input, a line each; answers to standard output, a line each.

A process imports once what takes seconds, and answers each question in a fork of its own, since Megatron and vLLM keep one
layout in a process.
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
    """Answer in whatever order answers are found, with `processes` forks at a time. The end of the questions ends this
    process. `module` is imported before the forks, which then have it."""
    warnings.simplefilter("ignore")  # of models that nobody will train or run
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what libraries print is no answer
    questions, sys.stdin = sys.stdin, None  # a fork closes its sys.stdin, for which it would wait: this reads from it
    importlib.import_module(module)
    lock = threading.Lock()

    def tell(question: dict[str, Any]) -> None:
        found = _in_a_fork(answer, question)
        with lock:
            print(json.dumps({"number": question["number"], **found}), file=answers, flush=True)

    workers = ThreadPoolExecutor(processes)
    for line in questions:
        workers.submit(tell, json.loads(line))
    for fork in multiprocessing.active_children():
        fork.kill()  # nobody waits for its answer any more
    os._exit(0)  # without what still waits for a worker


def _in_a_fork(answer: Answer, question: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    fork = context.Process(target=_send, args=(there, answer, question), daemon=True)
    fork.start()
    there.close()
    try:
        return dict(here.recv())
    except EOFError:
        fork.join()
        return {"failed": f"its process ended with status {fork.exitcode}"}
    finally:
        fork.join()
        here.close()


def _send(there: Connection, answer: Answer, question: dict[str, Any]) -> None:
    try:
        there.send({"answer": answer(question)})
    except Exception:  # noqa: BLE001 - who asked is told
        there.send({"failed": traceback.format_exc()[-4000:]})
