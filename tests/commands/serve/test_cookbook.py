"""The published client of Tinker and the loops of tinker-cookbook, unchanged, learn from `megarl serve`.

They need other versions of packages than vLLM: install tinker-cookbook[math-rl] into a second environment, and let
MEGARL_TINKER_PYTHON name its interpreter. Without it, the tests use this environment's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.serve.test_serve import KEY, Server
from tests.support.stack import ROOT

PYTHON = os.environ.get("MEGARL_TINKER_PYTHON", sys.executable)
IMPORTS = "import tinker, tinker_cookbook.recipes.rl_loop"
SETTINGS = {
    "sl": ["batch_size=32", "max_steps=10", "learning_rate=0.01", "max_length=200", "save_every=4"],
    "rl": ["batch_size=8", "group_size=8", "max_steps=12", "learning_rate=0.01", "max_tokens=24", "save_every=5"],
}
BUSY = "this server trains one model at a time"

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(quickstart_data: Path) -> Path:
    return quickstart_data / "model"


@pytest.fixture(scope="module")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    check = subprocess.run([PYTHON, "-c", IMPORTS], capture_output=True, text=True)
    if check.returncode:
        reason = check.stderr.strip().splitlines()[-1]
        pytest.skip(f"{PYTHON} has no tinker with tinker-cookbook[math-rl] ({reason}); see MEGARL_TINKER_PYTHON above")
    server = Server(model, tmp_path_factory.mktemp("served"), "data.max_prompt_length=400")
    try:
        yield f"http://127.0.0.1:{server.port()}"
    finally:
        server.process.terminate()
        server.process.wait(60)


def run_loop(kind: str, address: str, model: Path, folder: Path, *settings: str) -> list[dict[str, float]]:
    """Run a loop, and return its metrics. A server takes a new model 60 s after the loop before, which ends no session."""
    environment = os.environ | {"TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    arguments = [str(ROOT / "tests" / "support" / "cookbook_loops.py"), kind, str(model), str(folder), *settings]
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run([PYTHON, *arguments], env=environment, capture_output=True, text=True, timeout=900)
        if BUSY not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(10)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_loop_learns_and_resumes(address: str, model: Path, tmp_path: Path) -> None:
    lines = run_loop("sl", address, model, tmp_path, *SETTINGS["sl"])
    losses = [line["train_mean_nll"] for line in lines]
    assert len(losses) == 10 and losses[-1] < 0.6 * losses[0], losses
    # Without its last checkpoint the loop continues from the one before step 8.
    saved = (tmp_path / "checkpoints.jsonl").read_text().splitlines()
    (tmp_path / "checkpoints.jsonl").write_text("\n".join(saved[:2]) + "\n")
    again = run_loop("sl", address, model, tmp_path, *SETTINGS["sl"])[len(lines) :]
    assert [line["step"] for line in again] == [8, 9]
    assert [line["train_mean_nll"] for line in again] == pytest.approx(losses[8:], rel=1e-3), "not the same weights"


def test_the_reinforcement_loop_learns(address: str, model: Path, tmp_path: Path) -> None:
    lines = run_loop("rl", address, model, tmp_path, *SETTINGS["rl"])
    rewards = [line["reward/total"] for line in lines]
    assert len(rewards) == 12 and sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
