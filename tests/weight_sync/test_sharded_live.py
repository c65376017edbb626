"""Real trainers and real vLLM workers: after a sharded update an engine is bit-identical to one after a full update."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.base import EngineDead
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup
from megarl.weight_sync.publish import publish
from megarl.weight_sync.session import compare_reports, merge_reports
from tests.support.engine_process import EngineProcess, assert_same_digests, build_model, make_requests, same, spec
from tests.support.live_trainers import Trainers, TrainersFailed
from tests.support.megatron_layouts import LAYOUTS

pytestmark = [pytest.mark.stack, pytest.mark.slow]

PATIENCE = 400  # seconds, for an engine or trainers to start
TP2 = {"tensor_parallel": 2}
EP2 = {"tensor_parallel": 2, "expert_parallel": True}
F32, BF16 = "float32", "bfloat16"
# The engine's model, its layout and type; the trainers' layouts and types.
CASES: dict[str, tuple[str, dict[str, Any], str, list[tuple[str, str]]]] = {
    "moe-EP2": ("qwen3_moe", EP2, F32, [("TP2xPP2", F32), ("EP4", F32)]),
    "deepseek-EP2": ("deepseek_v3", EP2, F32, [("EP4", F32)]),
    "moe-bf16": ("qwen3_moe", {}, BF16, [("TP2xEP2", F32), ("TP2xPP2xEP2", BF16)]),
    "deepseek-TP2": ("deepseek_v3", TP2, F32, [("TP2xPP2", F32)]),
    "moe-TP2": ("qwen3_moe", TP2, F32, [("EP4", F32), ("TP2xPP2", F32)]),
    "qwen3-TP2": ("qwen3", TP2, F32, [("TP2xPP2", F32)]),
    "qwen2-tied-TP2": ("qwen2_tied", TP2, F32, [("TP2", F32), ("TP1", F32)]),
    "qwen2-tied-bf16": ("qwen2_tied", {}, BF16, [("TP2xPP2", BF16)]),
}


@pytest.fixture(scope="module")
def process():
    process = EngineProcess()
    process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
    yield process
    process.close()


@pytest.mark.parametrize("case", CASES)
def test_bit_equality(process: EngineProcess, tmp_path: Path, case: str) -> None:
    """Three updates with generation between; after each, the same weights again through full weight sync."""
    model, layout, loaded, sources = CASES[case]
    path = build_model(tmp_path / "model", model)
    starting = process.begin("start", spec(path, load_weights=False, dtype=loaded, **layout))
    try:
        for number, (source, held) in enumerate(sources):
            trainers = Trainers(tmp_path, path, LAYOUTS[source].megatron, LAYOUTS[source].processes, held)
            try:
                info = starting.result(PATIENCE)
                process.rpc("watch_layers" if number == 0 else "forget_names")
                three_updates(process, trainers, info, exact=model != "deepseek_v3")
            finally:
                trainers.close()
    finally:
        process.shutdown()


def three_updates(process: EngineProcess, trainers: Trainers, info: dict[str, Any], *, exact: bool) -> None:
    """`exact`: the engine repeats its samples (not DeepSeek-V3 in a batch on a CPU)."""
    former: list[dict[str, str]] = []
    for version in (1, 2, 3):
        trainers.call("change", version)
        update_planned(process, trainers, info, version)
        digests, tokens = process.rpc("digests"), process.generate(make_requests(3))[1]
        update_exported(process, trainers, info, version)
        assert_same_digests(digests, process.rpc("digests"))
        assert not exact or same(tokens, process.generate(make_requests(3))[1])
        assert digests != former, f"version {version} did not change the weights"
        former = digests


def update_planned(process: EngineProcess, trainers: Trainers, info: dict, version: int, **options: Any) -> Any:
    """Update in a new session that checks every tensor against the export."""
    receivers = info["receivers"]
    session = trainers.call("open_planned", receivers, {"bucket_mb": 1, "timeout": 60.0, **options})[0]
    process.connect_weight_sync(session)
    report = None
    for number in (version, version + 100):  # the second without the check, and with everything planned
        sent, received = both(process, trainers, number)
        compare_reports(sent, received)
        assert (received.checked > 0) == (sent.checked > 0) == (number < 100)
        report = received
    return report


def both(process: EngineProcess, trainers: Trainers, version: int) -> tuple[Any, Any]:
    sending: Future[list[Any]] = trainers.begin("send_planned", version)
    received = process.update_weights(version)
    return merge_reports(sending.result(60)), received


def update_exported(process: EngineProcess, trainers: Trainers, info: dict, version: int) -> None:
    session = trainers.call("open_export", info["receivers"])[0]
    process.connect_weight_sync(session)
    sending = trainers.begin("send_export", version)
    received = process.update_weights(version)
    compare_reports(sending.result(60)[0], received)


def test_tensors_without_slices_are_loaded_by_vllms_loader(process: EngineProcess, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model")
    starting = process.begin("start", spec(path, load_weights=False))
    trainers = Trainers(tmp_path, path, {"expert_parallel": 2}, 2)
    process.replace("megarl.engines.vllm.layerwise_update", "needed_slices", "some_whole")
    try:
        info = starting.result(PATIENCE)
        process.rpc("watch_layers")
        three_updates(process, trainers, info, exact=True)
    finally:
        trainers.close()
        process.replace("megarl.engines.vllm.layerwise_update", "needed_slices", None)
        process.shutdown()


class Engine:
    """An engine's process with the interface that the controller uses."""

    name = "e0"

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self.process.begin(method, *arguments)


def sending(trainers: Trainers, method: str = "send_planned") -> ActorGroup:
    return ActorGroup(_Sending(trainers, method), Recipe())  # type: ignore[arg-type]


def receiving(process: EngineProcess) -> EngineHandle:
    return EngineHandle(Engine(process))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["flipped bit", "other values", "trainer dies", "engine dies"])
def test_a_fault_is_reported_with_its_cause(tmp_path: Path, fault: str) -> None:
    """The controller's `publish` reports a fault within seconds, with its cause, and no engine samples a partial version."""
    path = build_model(tmp_path / "model", "qwen3_moe")
    process, trainers = EngineProcess(), Trainers(tmp_path, path, {"expert_parallel": 2}, 2)
    try:
        info = process.begin("start", spec(path, load_weights=False)).result(PATIENCE)
        options = {"bucket_mb": 1, "timeout": 60.0, "check_every": 1}
        session = trainers.call("open_planned", info["receivers"], options)[0]
        process.connect_weight_sync(session)
        assert publish(sending(trainers), [receiving(process)], session, 1)["weight_sync/version"] == 1
        assert process.generate(make_requests(1))[1]
        send = "send_planned"
        if fault == "flipped bit":
            process.replace("megarl.weight_sync.fingerprint:Fingerprinter", "streaming", "flipping")
        elif fault == "engine dies":
            process.replace("megarl.weight_sync.fingerprint:Fingerprinter", "streaming", "dying")
        elif fault == "other values":
            trainers.call("break_one")
        else:
            send = "send_and_die"
        start = time.monotonic()
        with pytest.raises(TrainersFailed) as raised:
            publish(sending(trainers, send), [receiving(process)], session, 2)
        assert time.monotonic() - start < 10
        words = {
            "flipped bit": r"'e0/0' got other bytes than trainer \d sent in bucket \d+ of stream \d+ from trainer \d \(",
            "other values": r"layers.1.input_layernorm.weight \(bucket 0 of stream \d from trainer \d\)",
            "engine dies": r"engine rank e0/0 \(process \d+ on .*\) died in the update to version 2|engine e0: the engine's",
            "trainer dies": "None",
        }
        assert re.search(words[fault], str(raised.value)), str(raised.value)
        if fault != "engine dies":
            cause = (
                r"trainer 1 \(process \d+ on .*\) died in the update to version 2"
                if fault == "trainer dies"
                else words[fault]
            )
            with pytest.raises(EngineDead, match=cause):
                process.begin("generate", make_requests(1)).result(20)
    finally:
        trainers.close()
        process.process.kill()


class _Sending:
    """Trainers with the interface that the controller calls."""

    def __init__(self, trainers: Trainers, method: str = "send_planned") -> None:
        self.trainers, self.method = trainers, method

    def call(self, method: str, *arguments: Any) -> list[Any]:
        assert method == "send_weights"
        return self.trainers.call(self.method, *arguments)
