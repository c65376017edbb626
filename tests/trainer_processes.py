"""Start the processes of a trainer test, as torchrun would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def forget_last_model() -> None:
    """Let a process build another model: Megatron keeps the layout, and notes the last model's attention in the
    environment, where it would contradict the next one's."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def run_cases(module: str, processes: int, cases: list[dict[str, Any]], directory: Path, timeout: float = 400) -> None:
    """Run `python -m module CASES.json directory` in `processes` processes; fails with the ends of their output."""
    file = directory / f"{module}-{processes}.json"
    file.write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["WORLD_SIZE"] = str(processes)
    logs = [directory / f"{module}-{processes}-{rank}.log" for rank in range(processes)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(file), str(directory)],
                    cwd=ROOT,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [worker.wait(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)
