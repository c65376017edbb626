"""Engines with FP8 weights (`rollout.quantization`): updates of a real vLLM, bit-identical to a new engine's own quantization.

On CPUs only the FP8 kernels are stand-ins (tests/support/fp8_kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engine_process import (
    EngineProcess,
    assert_same_digests,
    build_model,
    change,
    full_sender,
    load_model,
    make_requests,
    same,
    spec,
    update,
)
from tests.support.sharded_trainers import SlicedTrainers

pytestmark = pytest.mark.stack

FP8 = {"dtype": "bfloat16", "quantization": "fp8"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("qwen3_moe", {}),
    "qwen3-TP2": ("qwen3", {"tensor_parallel": 2}),
    "moe-EP2": ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": True}),
    "tied": ("qwen2_tied", {}),
    "deepseek": ("deepseek_v3", {}),
}
SLOW = [pytest.param(name, marks=[] if name == "moe" else pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
    yield process
    process.close()


def changed_weights(model: Any, seed: int, directory: Path) -> dict[str, torch.Tensor]:
    """Change the model's weights, and write them to `directory` in bfloat16; returns them under their checkpoint names."""
    weights = {name: weight.bfloat16() for name, weight in change(model, seed, directory).items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return weights


def parameters(process: EngineProcess) -> list[dict[str, str]]:
    return [
        {name: digest for name, digest in rank.items() if "before repacking" not in name}
        for rank in process.rpc("digests")
    ]


@pytest.mark.parametrize("case", SLOW)
def test_an_updated_engine_equals_a_new_one(process: EngineProcess, tmp_path: Path, case: str) -> None:
    """Weights, scales and log-probs, after sharded updates and after a full one. Updates write in place, as graphs need."""
    kind, layout = CASES[case]
    path = build_model(tmp_path / "model", kind, expert_width=128, width=128)
    model, requests = load_model(path), make_requests(2)
    info = process.start(spec(path, load_weights=False, **FP8, **layout))
    process.rpc("watch_layers")
    storages = process.rpc("storages")
    for version in (1, 2):
        weights = changed_weights(model, version, tmp_path)
        trainers = SlicedTrainers(weights, info["receivers"], check_every=1)
        assert process.connect_weight_sync(trainers.session) is None
        assert trainers.update(process, version, weights).checked > 0
        trainers.close()
    assert process.rpc("storages") == storages
    sharded, samples = parameters(process), process.generate(requests)[1]

    sender = full_sender(process, info)
    update(process, sender, changed_weights(model, 3, tmp_path), 3)
    assert parameters(process) != sharded, "the weights changed"
    update(process, sender, weights, 4)
    sender.close()
    full = parameters(process)
    process.shutdown()
    assert_matrices_are_fp8(storages)

    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    process.start(spec(str(tmp_path), **FP8, **layout))
    process.rpc("watch_layers")
    new, of_new = parameters(process), process.generate(requests)[1]
    process.shutdown()
    assert_same_digests(sharded, new)
    assert_same_digests(full, new)
    assert kind == "deepseek_v3" or same(samples, of_new)  # on a CPU, it does not sample a batch bit-identically twice


def assert_matrices_are_fp8(storages: list[dict[str, tuple[str, int]]]) -> None:
    """Assert that the matrices of attention, MLPs and experts are in FP8, and nothing else is: no router, no output layer."""
    for rank in storages:
        for name, (dtype, _) in rank.items():
            is_matrix = name.endswith(("_proj.weight", "w13_weight", "w2_weight"))
            assert (dtype == "torch.float8_e4m3fn") == is_matrix, name
            assert not name.endswith(("gate.weight", "lm_head.weight")) or dtype == "torch.bfloat16", name


@pytest.mark.slow
def test_updates_are_verified_before_they_are_quantized(process: EngineProcess, tmp_path: Path) -> None:
    """The engine loads a weight that differs by less than FP8 can hold from the trainers' export."""
    path = build_model(tmp_path / "model", "qwen3", width=128)
    info = process.start(spec(path, load_weights=False, **FP8))
    weights = changed_weights(load_model(path), 1, tmp_path)
    trainers = SlicedTrainers(weights, info["receivers"], check_every=1)
    assert process.connect_weight_sync(trainers.session) is None
    name = "model.layers.1.mlp.down_proj.weight"
    held = trainers._weights[name]
    held[0, 0] = held[0, 0] * (1 + 2**-7)
    assert not torch.equal(held, weights[name]), "one rounding step of bfloat16"
    sending = [trainers._pool.submit(sender.send, 1, weights.items) for sender in trainers._senders]
    with pytest.raises(Exception, match=f"differ from the trainers' export, in 1 tensors: {name}"):
        process.update_weights(1)
    for pending in sending:
        with pytest.raises(Exception, match=r"differ|export"):
            pending.result(60)
    trainers.close()
    process.shutdown()
