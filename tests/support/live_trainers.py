"""Real trainer processes that send weights to real engines."""

from __future__ import annotations

import json
import os
import pickle
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.cluster.process import free_port
from tests.support.forks import start


class TrainersFailed(RuntimeError):
    """Errors of each rank, None for a rank that died; `logs` has the end of its log."""

    def __init__(self, errors: list[str | None], logs: list[str]) -> None:
        super().__init__("\n".join([str(errors), *logs]))
        self.errors = errors


class Trainers:
    """Processes of `tests.support.live_trainer_rank` that all execute the same commands."""

    def __init__(
        self,
        directory: Path,
        model: str,
        layout: dict[str, Any],
        size: int,
        dtype: str = "float32",
        lora: dict[str, Any] | None = None,
        weights_only: bool = False,
    ) -> None:
        """`weights_only`: without gradients and optimizer states."""
        case = directory / "case.json"
        settings = {"model": model, "megatron": layout, "dtype": dtype, "lora": lora or {}}
        case.write_text(json.dumps({**settings, "weights_only": weights_only}))
        self.size, self._calls = size, 0
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
        }
        self.logs = [directory / f"trainer{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = [case, self._store.port]
            self.processes.append(start("trainer", "tests.support.live_trainer_rank", arguments, variables, log))
        self._pool = ThreadPoolExecutor(1)

    def begin(self, method: str, *arguments: Any) -> Future[list[Any]]:
        number = self._calls
        self._calls += 1
        self._store.set(f"call/{number}", pickle.dumps((method, arguments)))
        return self._pool.submit(self._answers, number)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.begin(method, *arguments).result(500)

    def _answers(self, number: int) -> list[Any]:
        keys = [f"answer/{number}/{rank}" for rank in range(self.size)]
        while True:
            present = [self._store.check([key]) for key in keys]
            dead = [process.poll() is not None for process in self.processes]
            if all(present) or any(dead):  # after a death the other ranks may never answer
                break
            time.sleep(0.01)
        pairs = zip(keys, present, strict=True)
        answers = [pickle.loads(self._store.get(key)) if is_present else None for key, is_present in pairs]  # noqa: S301 -- our own
        errors = [None if answer is None else answer[0] for answer in answers]
        if None in answers or any(errors):
            lost = [log.read_text()[-2000:] for log, answer in zip(self.logs, answers, strict=True) if answer is None]
            raise TrainersFailed(errors, lost)
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._pool.shutdown(wait=False)
