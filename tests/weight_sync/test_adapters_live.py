"""Adapters of real trainers in real vLLM workers: an engine with separate adapters gives the samples of an engine with
merged weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.engines.base import AdapterSpec, EngineDead, EngineRefused
from megarl.weight_sync.session import compare_reports
from tests.support.engine_process import EngineProcess, build_model, gaps, load_model, make_requests, spec
from tests.support.live_trainers import Trainers, TrainersFailed

pytestmark = [pytest.mark.stack, pytest.mark.slow]

RANK = 4
# Merged weights compute x (W + s B A), separate adapters x W + s (x A) B: the same terms summed in another order in
# float32. The same bound holds between an engine's log-probs and the Hugging Face model's.
BOUND = 5e-5
# The engine's model and layout; the linears with adapters; the trainers' layout.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int, dict[str, Any]]] = {
    "qwen2-tied-TP2": ("qwen2_tied", {"tensor_parallel": 2}, ("all-linear",), 2, {"tensor_parallel": 2}),
    "qwen3-all": ("qwen3", {}, ("all-linear",), 1, {}),
    "qwen3-some-PP2": ("qwen3", {}, ("v_proj", "up_proj"), 2, {"pipeline_parallel": 2}),
}


@pytest.fixture(scope="module")
def processes():
    both = EngineProcess(), EngineProcess()
    yield both
    for process in both:
        process.close()


class Run:
    """Two engines of one model: the first takes adapters, the second merged weights."""

    def __init__(self, processes: Any, directory: Path, case: str, dtype: str = "float32", engines: int = 2) -> None:
        processes = processes[:engines]
        model, layout, targets, size, megatron = CASES[case]
        self.path = build_model(directory / "model", model)
        self.engines, self.version = processes, 0
        adapters = AdapterSpec(RANK, targets)
        specs = [spec(self.path, load_weights=False, dtype=dtype, adapters=part, **layout) for part in (adapters, None)]
        starting = [engine.begin("start", options) for engine, options in zip(processes, specs, strict=False)]
        lora = {"rank": RANK, "alpha": 10.0, "targets": list(targets)}
        self.trainers = Trainers(directory, self.path, megatron, size, dtype, lora)
        self.infos = [future.result(400) for future in starting]
        for engine, info, opening in zip(processes, self.infos, ("open_adapters", "open_export"), strict=False):
            assert engine.connect_weight_sync(self.trainers.call(opening, info["receivers"])[0]) is None

    def update(self, size: float = 0.1) -> list[Any]:
        """Train new adapters and update all engines. Returns the sender's report for each."""
        self.version += 1
        self.trainers.call("learn", self.version, size)
        sent = []
        for engine, sending in zip(self.engines, ("send_adapters", "send_export"), strict=False):
            future = self.trainers.begin(sending, self.version)
            received = engine.begin("update_weights", self.version).result(120)
            sent.append(future.result(120)[0])
            compare_reports(sent[-1], received)
        return sent


@pytest.mark.parametrize("case", ["qwen2-tied-TP2", "qwen3-some-PP2"])
def test_separate_adapters_sample_like_merged_weights(processes: Any, tmp_path: Path, case: str) -> None:
    run = Run(processes, tmp_path, case)
    try:
        assert [info["merged_because"] for info in run.infos] == [None, "the recipe has no adapters"]
        requests, before = make_requests(count=6, n=2), None
        for _ in range(3):
            apart, merged = run.update()
            (_, samples), (_, expected) = (engine.generate(requests) for engine in processes)
            check_same(samples, expected)
            if before is not None:
                assert apart.bytes < 0.3 * merged.bytes
                assert not any(np.array_equal(samples[key][0].tokens, before[key][0].tokens) for key in samples), (
                    "old adapters"
                )
            else:
                assert apart.bytes > merged.bytes, "the first update also brings the weights"
            before = samples
        run.trainers.call("write", str(tmp_path / "merged.safetensors"))
        check_against(tmp_path, run.path, requests, before)
    finally:
        run.trainers.close()


def test_requests_in_flight_continue_with_the_new_adapters(processes: Any, tmp_path: Path) -> None:
    """The engine recomputes a request's KV cache: later tokens are sampled with the new weights."""
    run, process = Run(processes, tmp_path, "qwen3-all", engines=1), processes[0]
    try:
        run.update()
        process.generate(make_requests(count=2, n=1, max_tokens=2))
        requests = make_requests(count=3, n=4, max_tokens=110)[1:]
        flying = process.begin("generate", make_requests(count=1, n=1, max_tokens=5) + requests)
        while len(process.finished()) != 1:  # until the short request has finished
            time.sleep(0.001)
        process.pause()
        run.update()
        process.resume()
        _, samples = flying.result(120)
        run.trainers.call("write", str(tmp_path / "merged.safetensors"))
        model = load_model(run.path)
        model.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=False)
        for request in requests:
            for sample in samples[request.group]:
                new = gaps(model, request, sample) < BOUND
                assert len(new) == 110 and new[-10:].all() and not new.all(), (
                    "the beginning must have the old weights and the end the new ones"
                )
    finally:
        run.trainers.close()


def test_bfloat16(processes: Any, tmp_path: Path) -> None:
    """Merging rounds W + s B A to bfloat16 and loses updates below a weight's last bit; separate adapters keep them.

    Both engines are compared with the merged weights in float32.
    """
    run = Run(processes, tmp_path, "qwen3-all", "bfloat16")
    try:
        run.update(size=0.02)
        run.trainers.call("write_exact", str(tmp_path / "merged.safetensors"))
        requests, model = make_requests(count=6, n=4), load_model(run.path)
        model.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=False)
        apart, merged = (
            np.concatenate([gaps(model, request, sample) for request in requests for sample in samples[request.group]])
            for _, samples in (engine.generate(requests) for engine in processes)
        )
        print(f"mean gap to float32, separate adapters {apart.mean():.5f}, merged {merged.mean():.5f}")
        assert apart.mean() < 1.1 * merged.mean()
    finally:
        run.trainers.close()


def test_adapters_that_differ_from_the_merged_weights_end_the_update(processes: Any, tmp_path: Path) -> None:
    """A trainer sends another linear's rows: the check against the export fails before the engines sample."""
    run = Run(processes, tmp_path, "qwen3-all", engines=1)
    try:
        run.update()
        run.trainers.call("mix_up")
        received = run.engines[0].begin("update_weights", 2)
        with pytest.raises(
            TrainersFailed, match=r"adapters of model.layers.0.self_attn.k_proj.weight, .*differ from the merged"
        ):
            run.trainers.call("send_adapters", 2)
        with pytest.raises(RuntimeError, match="differ from the merged exported weights"):
            received.result(120)
    finally:
        run.trainers.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("swapped", r"qkv_proj of the engine's model does not hold the adapter of model.layers.0.self_attn.k_proj"),
        ("no weights", r"parameters of the engine's model got no weights"),
        ("weights again", r"model.embed_tokens.weight came again, but later updates must contain only adapters"),
    ],
)
def test_adapters_that_differ_from_those_sent_end_the_engine(
    processes: Any, tmp_path: Path, fault: str, words: str
) -> None:
    run = Run(processes, tmp_path, "qwen3-all", engines=1)
    process = processes[0]
    try:
        if fault == "weights again":
            run.update()
        if fault == "swapped":
            process.replace("vllm.lora.model_manager", "PackedLoRALayerWeights", "SwappingKeyAndValue")
        run.trainers.call("learn", 9, 0.1)
        run.trainers.begin("send_adapters", run.version + 1, fault == "no weights")
        with pytest.raises(ValueError, match=words):
            process.update_weights(run.version + 1)
        with pytest.raises((EngineDead, EngineRefused)):
            process.generate(make_requests(count=1))
    finally:
        process.replace("vllm.lora.model_manager", "PackedLoRALayerWeights", None)
        run.trainers.close()


def check_same(actual: dict[int, Any], expected: dict[int, Any]) -> None:
    for key, samples in actual.items():
        for left, right in zip(samples, expected[key], strict=True):
            assert np.array_equal(left.tokens, right.tokens)
            assert np.abs(left.log_probs - right.log_probs).max() < BOUND


def check_against(directory: Path, path: str, requests: Any, samples: Any) -> None:
    """The Hugging Face model gives the same log-probs with the trainer's exported weights, and others without adapters."""
    model, largest_gaps = load_model(path), []
    request = requests[0]
    for weights in ({}, load_file(directory / "merged.safetensors")):
        model.load_state_dict(weights, strict=False)
        largest_gaps.append(max(float(gaps(model, request, sample).max()) for sample in samples[request.group]))
    assert largest_gaps[1] < BOUND < 0.1 < largest_gaps[0], largest_gaps
