"""Client of the counting processes `rank_process.py` and `engine_process.py`, which play any rank of a layout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.workload import Workload
from megarl.engines.base import EngineSpec
from megarl.platform.version_sets import refuse_cuda_builds
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml

TRAINERS = "megarl.commands.plan.count.rank_process"
ENGINES = "megarl.commands.plan.count.engine_process"


class CannotCount(RuntimeError):
    """A rank could not be built or run, for a reason that megarl's checks do not cover."""


@dataclass(frozen=True)
class RankRequest:
    """Ask for the memory of one rank of a recipe's actor or critic.

    `work`: also run this work and count activations; None: skip. `held_slices`: also return the slices of the checkpoint's
    tensors that the ranks of the same pipeline stage hold. The recipe's `model.path` (or the critic's) needs only a
    config.json.
    """

    recipe: Recipe
    rank: int
    critic: bool = False
    work: Workload | None = None
    held_slices: bool = False

    def payload(self, file: Callable[[Recipe], str]) -> dict[str, Any]:
        """Return the request as JSON values. `file` writes a recipe to a file and returns its path."""
        return {**vars(self), "recipe": file(self.recipe), "work": self.work and asdict(self.work)}


@dataclass(frozen=True)
class EngineRequest:
    """Ask for the memory of one engine rank, or, with a file of checkpoint `tensors`, for the slices that it needs.

    `spec.model_path` needs only a config.json.
    """

    engine: str  # vllm, sglang
    spec: EngineSpec
    rank: int = 0
    tensors: Path | None = None

    def payload(self, file: Callable[[Recipe], str]) -> dict[str, Any]:
        return {**asdict(self), "tensors": self.tensors and str(self.tensors)}


class RankClient:
    """A counting process that stays alive between requests, so that its slow imports run once. Thread-safe.

    The first request starts the process. Leaving the context ends it, also with requests in flight. Entering it raises
    NotHereError if packages are installed with which the process could not import vLLM and transformers.
    """

    def __init__(self, processes: int = 2, child: str = TRAINERS) -> None:
        self._command = [sys.executable, "-m", child, str(processes)]
        self._directory = tempfile.TemporaryDirectory()
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[str] | None = None
        self._recipes: dict[int, tuple[Recipe, str]] = {}
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock, self._asked, self._over = threading.Lock(), 0, False

    def __enter__(self) -> RankClient:
        refuse_cuda_builds()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the process has already ended
                self._process.stdin.close()  # end of input: the process exits
            self._reader.join()
            self._process.wait()
        self._stderr.close()
        self._directory.cleanup()

    def submit(self, question: RankRequest | EngineRequest) -> Future[dict[str, Any]]:
        """Send a request. The future raises CannotCount if the rank fails, RuntimeError if the process ends."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number, self._asked = self._asked, self._asked + 1
            if self._over:
                future.set_exception(self._failure())
                return future
            self._waiting[number] = future
            message = {"number": number, **question.payload(self._file)}
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the process has ended: the reader fails the future
                print(json.dumps(message), file=self._process.stdin, flush=True)
        return future

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _file(self, recipe: Recipe) -> str:
        """Return the YAML file of a recipe, written once per recipe object."""
        if id(recipe) not in self._recipes:
            path = Path(self._directory.name) / f"{len(self._recipes)}.yaml"
            counted = replace(recipe, train=replace(recipe.train, epochs=None))  # with `steps` it would be refused
            path.write_text(to_yaml(counted), encoding="utf-8")
            self._recipes[id(recipe)] = recipe, str(path)  # keeps the recipe alive, so its id stays unique
        return self._recipes[id(recipe)][1]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.pop(answer["number"])
            if "failed" in answer:
                future.set_exception(CannotCount(f"the planner could not count a rank: {answer['failed']}"))
            else:
                future.set_result(answer["answer"])
        process.wait()
        with self._lock:
            self._over, left = True, list(self._waiting.values())
        for future in left:
            future.set_exception(self._failure())

    def _failure(self) -> RuntimeError:
        assert self._process is not None
        self._stderr.seek(0)
        stderr = self._stderr.read()[-4000:]
        return RuntimeError(f"the planner's process ended with status {self._process.returncode}:\n{stderr}")
