"""Start the processes of a trainer test, as torchrun would."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.cluster.process import free_port
from tests.support.forks import start

SERVER_OF = {
    "tests.support.mindspeed_ranks": "mindspeed",
    "tests.support.transformer_engine_ranks": "transformer_engine",
    "tests.support.untouched_ranks": "nothing",
    "tests.support.activations_worker": "nothing",  # replaces collectives before Megatron is imported
}
"""Modules of processes that need other imports than a trainer on the CPU."""


CASES = 4
"""At most, of one process. Models with experts leave their groups behind, with some fifty threads that gloo wakes a hundred
times a second: after thirty cases they take more time than the cases."""


def forget_last_model() -> None:
    """Let a process build another model: Megatron keeps the layout and its groups, and stores the last model's attention backend
    in the environment, which would conflict with the next model's."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    gc.collect()  # the last model, which still holds its groups
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def run_cases(module: str, processes: int, cases: list[dict[str, Any]], directory: Path, timeout: float = 400) -> None:
    """Run `python -m module CASES.json directory` in `processes` processes; see `run_ranks`."""
    for number, first in enumerate(range(0, len(cases), CASES)):
        log = directory / f"{module}-{processes}-{number}"
        file = log.with_name(f"{log.name}.json")
        file.write_text(json.dumps(cases[first : first + CASES]))
        run_ranks(module, processes, [file, directory], log, timeout)


def serve_cases(run: Callable[[dict[str, Any], Path], None]) -> None:
    """Run each case in this process, which `run_cases` has started: `run(case, directory)`."""
    import torch.distributed as dist

    import megarl.trainer.worker as trainer_worker

    logging.disable(logging.WARNING)
    cases, directory = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    trainer_worker.join_ranks = lambda *_: None  # type: ignore[assignment]  # one group serves all trainers of this process
    for case in cases:
        run(case, directory)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(module: str, processes: int, arguments: list[Path], log: Path, timeout: float) -> None:
    """Run `python -m module ARGUMENTS` in `processes` processes with logs `log`-RANK.log.

    The processes are forked from one that has imported Megatron; see `tests.support.forks`. When a process fails, AssertionError
    shows the end of its log, and the others, which wait for it, are killed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
    }
    files = [log.with_name(f"{log.name}-{rank}.log") for rank in range(processes)]
    ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    server = SERVER_OF.get(module, "trainer")
    workers = [start(server, module, arguments, variables, file) for variables, file in zip(ranks, files, strict=True)]
    deadline = time.monotonic() + timeout
    codes: list[int | None] = [None]
    try:
        while None in codes and not any(codes):
            codes = [worker.poll() for worker in workers]
            assert time.monotonic() < deadline, f"{module} took more than {timeout:.0f} s:\n{_ends(files)}"
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not any(codes), _ends([file for file, code in zip(files, codes, strict=True) if code])


def _ends(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in logs)
