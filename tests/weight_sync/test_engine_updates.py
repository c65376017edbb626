"""Sharded updates of a real vLLM: three in a row, each bit-identical to the full export, with exact log-probs.

`tests/engines/test_older_vllm.py` runs this file on older vLLM versions. `tests/weight_sync/test_sharded_live.py` uses Megatron trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_process import (
    EngineProcess,
    assert_exact,
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

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TP2 = {"tensor_parallel": 2}
EP2 = {"tensor_parallel": 2, "expert_parallel": True}
# Kind of model, the engine's layout. 0.23's expert kernel computes 32 rows of an expert at a time (cpu_fused_moe.cpp:247).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-TP2": ("qwen3", TP2),
    "tied": ("qwen2_tied", {}),
    "moe": ("qwen3_moe", {}),
    "moe-TP2": ("qwen3_moe", TP2),
    "moe-EP2": ("qwen3_moe", EP2),
    "router-bias": ("glm4_moe", {}),
    "deepseek": ("deepseek_v3", {}),
    "deepseek-TP2": ("deepseek_v3", TP2),
}


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
    yield process
    process.close()


@pytest.mark.parametrize("case", CASES)
def test_sharded_updates_equal_the_export(process: EngineProcess, tmp_path: Path, case: str) -> None:
    kind, layout = CASES[case]
    path = build_model(tmp_path / "model", kind, expert_width=64)
    model = load_model(path)
    info = process.start(spec(path, load_weights=False, **layout))
    process.rpc("watch_layers")
    former: list[Any] = []
    try:
        for version in (1, 2, 3):
            weights = change(model, version, tmp_path)
            trainers = SlicedTrainers(weights, info["receivers"], check_every=1)
            assert process.connect_weight_sync(trainers.session) is None
            report = trainers.update(process, version, weights)
            assert report.checked > 0
            planned, requests = process.rpc("digests"), make_requests(2)
            samples = process.generate(requests)[1]
            assert_exact(model, requests, samples)
            trainers.close()

            sender = full_sender(process, info)
            update(process, sender, weights, version)
            sender.close()
            exported = process.rpc("digests")
            for rank, (left, right) in enumerate(zip(planned, exported, strict=True)):
                differing = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
                assert differing == [], f"rank {rank}"
            # On a CPU, DeepSeek-V3 does not sample a batch bit-identically twice.
            assert kind == "deepseek_v3" or same(samples, process.generate(requests)[1])
            assert planned != former, "the weights changed"
            former = planned
    finally:
        process.shutdown()


@pytest.mark.parametrize("case", ["qwen3-TP2", "moe-EP2", "deepseek"])
def test_staged_updates_equal_direct_ones(process: EngineProcess, tmp_path: Path, case: str) -> None:
    """With `at_update` finish, weights wait in host memory: the engine samples with the old ones until it loads the new ones."""
    kind, layout = CASES[case]
    path = build_model(tmp_path / "model", kind, expert_width=64)
    model = load_model(path)
    info = process.start(spec(path, load_weights=False, at_update="finish", **layout))
    process.rpc("watch_layers")
    try:
        weights = change(model, 1, tmp_path)
        trainers = SlicedTrainers(weights, info["receivers"], check_every=0)
        assert process.connect_weight_sync(trainers.session) is None
        trainers.update(process, 1, weights)
        first = process.rpc("digests")
        for version in (2, 3):  # version 3 takes the place of version 2
            weights = change(model, version, tmp_path)
            trainers.update(process, version, weights)
            assert process.rpc("digests") == first, "loaded too early"
        assert process.load_weights() == 3 and process.load_weights() == 3
        requests = make_requests(2)
        assert_exact(model, requests, process.generate(requests)[1])
        staged = process.rpc("digests")
        trainers.close()

        sender = full_sender(process, info)  # another session: its first update is direct
        update(process, sender, weights, 4)
        sender.close()
        assert process.load_weights() == 4 and process.rpc("digests") == staged
    finally:
        process.shutdown()
