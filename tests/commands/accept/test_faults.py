"""Planted faults: the responsible stage must report each, with its cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# The fault, and words of the check that must fail.
EXPECTED = {
    "attends_to_neighbours": "attention, 4 query and 2 key heads of 128 forward",
    "attention_scale": "MLA attention 192/128 forward",
    "key_heads_swapped": "attention, 4 query and 2 key heads of 128 forward",
    "not_repeatable": "MLA attention 192/128 is not repeatable under train.deterministic",
    "norm_without_weight": "rms_norm forward",
    "norm_backward": "rms_norm backward, input 1",
    "gate_and_up_swapped": "rms_norm, linear and swiglu forward",
    "rotary_shifted": "rotary embedding forward",
    "no_bias_correction": "Adam, 2 steps",
    "experts_shifted": "grouped matmul of experts forward",
    "expert_without_gradient": "weight gradient of expert 4 down",
    "unpermute_without_shares": "permute and unpermute forward",
    "parity third_layer": "layer 3 is the first that differs",
    "parity one_gradient": "model.layers.2.self_attn.o_proj.weight differs most",
    "parity learning_rate": "the optimizer's steps differ",
    "parity offload_loses": "log-probs after 2 steps",
    "parity checkpoint_loses": "a step after a resume differs from the uninterrupted run",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.planted_kernels", str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", ["none dense", "none moe", "parity none"])
def test_no_failure_is_reported_without_a_fault(results: dict[str, Any], name: str) -> None:
    assert results[name] == []


@pytest.mark.parametrize("fault", EXPECTED)
def test_fault_of_a_layer_is_named(results: dict[str, Any], fault: str) -> None:
    assert any(EXPECTED[fault] in line for line in results[fault]), results[fault]
    if not fault.startswith("parity"):
        kernel = EXPECTED[fault].split(" is not ")[0].split(" forward")[0].split(" backward")[0].split(" of ")[0]
        family = "grouped matmul" if "expert" in fault else kernel
        assert all(family in line for line in results[fault]), f"other kernels are accused: {results[fault]}"
