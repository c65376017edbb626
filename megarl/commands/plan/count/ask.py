"""Asks the processes that are any rank what ranks hold; see child.py and engine_child.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.commands.plan.count.workload import Workload
from megarl.engines.base import EngineSpec
from megarl.recipe.load import to_yaml
from megarl.recipe.schema import Recipe

TRAINERS = "megarl.commands.plan.count.rank_process"
ENGINES = "megarl.commands.plan.count.engine_process"


class CannotCount(RuntimeError):
    """A rank could not be built, or run, for another reason than what megarl's checks say."""


class Askable(Protocol):
    def told(self, file: Callable[[Recipe], str]) -> dict[str, Any]:
        """The question in plain values. `file` gives the file that a recipe is written to."""
        ...


@dataclass(frozen=True)
class Question:
    """About one rank of a recipe's actor, or of its critic. `work`: None asks for what it holds alone. `holdings`: also for
    what all ranks of its stage hold of the checkpoint's tensors.

    The recipe's `model.path` (the critic's) needs a config.json and nothing else.
    """

    recipe: Recipe
    rank: int
    critic: bool = False
    work: Workload | None = None
    holdings: bool = False

    def told(self, file: Callable[[Recipe], str]) -> dict[str, Any]:
        work = self.work and asdict(self.work)
        recipe = file(self.recipe)
        return {
            "recipe": recipe,
            "critic": self.critic,
            "rank": self.rank,
            "work": work,
            "holdings": self.holdings,
        }


@dataclass(frozen=True)
class EngineQuestion:
    """About one rank of an engine. `tensors`: a file with those of a checkpoint, to ask what of them it needs.

    `spec.model_path` needs a config.json and nothing else.
    """

    engine: str  # vllm, sglang
    spec: EngineSpec
    rank: int = 0
    tensors: Path | None = None

    def told(self, file: Callable[[Recipe], str]) -> dict[str, Any]:
        tensors = self.tensors and str(self.tensors)
        return {"engine": self.engine, "spec": asdict(self.spec), "rank": self.rank, "tensors": tensors}


def ask(questions: Sequence[Askable], child: str = TRAINERS, processes: int = 2) -> list[dict[str, Any]]:
    """Answers as the child's `answer` gives them, in the order of the questions; `processes` work at a time."""
    with Asker(processes, child) as asker:
        return [future.result() for future in [asker.submit(question) for question in questions]]


class Asker:
    """A process, for as long as there are questions: what takes seconds to import is imported once. Any thread may ask.

    The first question starts it. Leaving this ends it, whatever it still works on.
    """

    def __init__(self, processes: int = 2, child: str = TRAINERS) -> None:
        self._command = [sys.executable, "-m", child, str(processes)]
        self._directory = tempfile.TemporaryDirectory()
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[str] | None = None
        self._recipes: dict[int, tuple[Recipe, str]] = {}
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock, self._asked, self._over = threading.Lock(), 0, False

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()  # which ends it
            self._reader.join()
            self._process.wait()
        self._stderr.close()
        self._directory.cleanup()

    def submit(self, question: Askable) -> Future[dict[str, Any]]:
        """The answer to come. Raises CannotCount there for a rank that fails, RuntimeError where the process ends."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number, self._asked = self._asked, self._asked + 1
            if self._over:
                future.set_exception(self._failure())
                return future
            self._waiting[number] = future
            asked = {"number": number, **question.told(self._file)}
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: the reader says so in the future
                print(json.dumps(asked), file=self._process.stdin, flush=True)
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
        """Of a recipe, written once however often it is asked about."""
        if id(recipe) not in self._recipes:
            path = Path(self._directory.name) / f"{len(self._recipes)}.yaml"
            path.write_text(to_yaml(recipe), encoding="utf-8")
            self._recipes[id(recipe)] = recipe, str(path)  # the recipe as well: its id is not given again
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
        said = self._stderr.read()[-4000:]
        return RuntimeError(f"the planner's process ended with status {self._process.returncode}:\n{said}")
