"""A trainer's forward and backward pass must not read device values: the host would wait for the device at every layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.activations_cases import case, config_of

CASES = [
    case("Qwen3-8B", 2, context_parallel=2, recompute="selective"),
    case("Qwen3-30B-A3B", 4, tensor_parallel=2, expert_parallel=2, recompute="full"),
    case("DeepSeek-V3", 2, expert_parallel=2),
]


@pytest.mark.slow
def test_a_pass_copies_nothing_from_the_device(tmp_path: Path) -> None:
    """Token counts per expert are already on the host, where Megatron's all-to-all needs them."""
    for reads_case in CASES:
        (tmp_path / reads_case["model"]).mkdir()
        (tmp_path / reads_case["model"] / "config.json").write_text(json.dumps(config_of(reads_case["model"])))
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([{**reads_case, "directory": str(tmp_path)} for reads_case in CASES]))
    command = [sys.executable, "-m", "tests.support.device_reads_worker", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {reads_case["name"]: [] for reads_case in CASES}
