"""Helpers of the tests on the real stack: run the command line in a separate process and read its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl.cluster.process import free_port

ROOT = Path(__file__).parents[2]


def command(*arguments: str, torchrun: int = 0, module: str = "megarl") -> list[str]:
    """The command line of ``megarl ARGUMENTS``, under torchrun with `torchrun` processes if not 0."""
    if not torchrun:
        return [sys.executable, "-m", module, *arguments]
    ranks, port = f"--nproc-per-node={torchrun}", f"--master-port={free_port()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", ranks, port]
    return [*launcher, "-m", module, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(
    *arguments: str, torchrun: int = 0, timeout: float = 400, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in the repository's root and wait for its end. `env`: variables in addition to `environment`."""
    return subprocess.run(
        command(*arguments, torchrun=torchrun),
        cwd=ROOT,
        env={**environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
