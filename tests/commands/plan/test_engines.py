"""Memory of an engine rank by vLLM's model on the meta device, compared with a real worker and published models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.plan.count.rank_client import ENGINES, EngineRequest
from megarl.engines import arguments_of
from megarl.engines.base import EngineSpec
from megarl.hf import published
from tests.support.count_ranks import count_ranks
from tests.support.megatron_models import write_model

ROOT = Path(__file__).parents[3]
# Model, tensor parallel, engines of a group, whole experts -> billions of parameters, KiB of the KV cache a token.
PUBLISHED: list[tuple[str, int, int, bool, float, float]] = [
    ("Qwen3-8B", 1, 1, False, 8.190735360, 144),  # 8.2 B
    ("Qwen3-30B-A3B", 1, 1, False, 30.532122624, 96),  # 30.5 B
    ("DeepSeek-V3", 1, 1, False, 671.026419200, 68.625),  # 671 B; 70.272 KB: arXiv 2505.09343, table 1
    ("DeepSeek-V3", 2, 128, True, 12.905780736, 68.625),
    ("Qwen3-30B-A3B", 4, 4, True, 2.206808064, 24),
    ("Qwen2.5-VL-7B-Instruct", 1, 1, False, 8.292166656, 56),
]


def engine_request(name: str, directory: Path, spec: EngineSpec, **changes: Any) -> EngineRequest:
    return EngineRequest(name, replace(spec, model_path=str(directory), **changes))


def spec(directory: Path, **settings: Any) -> EngineSpec:
    return EngineSpec(
        "e", str(directory), **{"dtype": "bfloat16", "max_model_len": 3072, "load_weights": False, **settings}
    )


@pytest.mark.slow
@pytest.mark.stack
def test_published_models(tmp_path: Path) -> None:
    questions = []
    for name, tensor, data, experts, *_ in PUBLISHED:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(published.read(name)))
        engine_spec = spec(
            directory,
            tensor_parallel=tensor,
            data_parallel=data,
            expert_parallel=experts,
            return_routed_experts=experts,
        )
        questions.append(engine_request("vllm", directory, engine_spec))
    answers = count_ranks(questions, ENGINES)
    assert [answer.get("error") for answer in answers] == [None] * len(questions)
    figures = [(answer["parameters"] / 1e9, answer["cache_per_token"] / 1024) for answer in answers]
    assert figures == [(billions, cache) for *_, billions, cache in PUBLISHED]
    for answer in answers:
        assert answer["largest"] < answer["weights"] and answer["working"] < 2**32


@pytest.mark.slow
@pytest.mark.stack
def test_a_draft_is_counted(tmp_path: Path) -> None:
    """DeepSeek-V3's prediction layer: a decoder layer with 257 experts and a projection, by its config.json; embedding and output
    layer are the policy's."""
    (tmp_path / "config.json").write_text(json.dumps(published.read("DeepSeek-V3")))
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    specs = [spec(tmp_path), spec(tmp_path, engine_args=drafts)]
    without, with_draft = count_ranks([engine_request("vllm", tmp_path, each) for each in specs], ENGINES)
    experts, latent, projection = (
        257 * 3 * 7168 * 2048,
        7168 * 2112 + 24576 * 1536 + 512 * 32768 + 16384 * 7168,
        2 * 7168**2,
    )
    layer = experts + latent + projection
    assert with_draft["parameters"] - without["parameters"] == pytest.approx(layer, rel=1e-3)
    assert with_draft["weights"] - without["weights"] == pytest.approx(2 * layer, rel=0.01)
    assert with_draft["cache_per_token"] / without["cache_per_token"] == pytest.approx(62 / 61)
    assert with_draft["received"] == without["received"]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("experts", [False, True])
def test_counted_bytes_equal_those_of_a_real_vllm_worker(name: str, experts: bool, tmp_path: Path) -> None:
    directory = write_model(name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    settings: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": experts, "max_model_len": 128}
    engine_spec = spec(directory, dtype="float32", **settings)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    (answer,) = count_ranks([engine_request("vllm", tmp_path / "alone", engine_spec)], ENGINES)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engine_counts"],
        input=json.dumps(asdict(engine_spec)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert [answer["parameters"], answer["weights"] - answer["tables"], answer["cache_per_token"]] == first


def test_limits_follow_the_engine_arguments() -> None:
    vllm = arguments_of("vllm").limits(spec(Path("m")))
    assert (vllm.tokens, vllm.sequences, vllm.share, vllm.covers_step) == (2048, 128, 0.92, True)
    whole = arguments_of("vllm").limits(
        spec(Path("m"), engine_args={"enable_chunked_prefill": False, "max_num_seqs": 7})
    )
    assert (whole.tokens, whole.sequences) == (3072, 7)
    cpu = arguments_of("vllm").limits(spec(Path("m"), device="cpu"))
    assert (cpu.tokens, cpu.cache) == (8192, 256 << 20)
    sglang = arguments_of("sglang").limits(
        spec(Path("m"), engine_args={"mem_fraction_static": 0.3, "chunked_prefill_size": -1})
    )
    assert (sglang.tokens, sglang.share, sglang.covers_step) == (16384, 0.3, False) and sglang.assumed


@pytest.mark.slow
@pytest.mark.stack
def test_quantized_weights(tmp_path: Path) -> None:
    """FP8 takes a byte per weight, and four per block of 128 x 128. Embedding, output layer, norms and routers stay in bfloat16."""
    expected = {}
    requests = []
    for name in ("Qwen3-8B", "Qwen3-30B-A3B"):
        directory = tmp_path / name
        directory.mkdir()
        config = published.read(name)
        (directory / "config.json").write_text(json.dumps(config))
        hidden, layers, experts = config["hidden_size"], config["num_hidden_layers"], config.get("num_experts", 0)
        heads, groups, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        matrices = hidden * head * (2 * heads + 2 * groups) + 3 * hidden * width * (experts or 1)
        others = 2 * config["vocab_size"] * hidden + hidden + layers * (2 * hidden + 2 * head + hidden * experts)
        expected[name] = layers * (matrices + 4 * matrices // 128**2) + 2 * others, 2 * (layers * matrices + others)
        requests.append(engine_request("vllm", directory, spec(directory, quantization="fp8")))
    answers = count_ranks(requests, ENGINES)
    for (weights, received), answer in zip(expected.values(), answers, strict=True):
        assert answer["weights"] - answer["tables"] == weights and answer["received"] == received
