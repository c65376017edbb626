"""Models of Megatron's Transformer Engine modules give the same results as models of megarl's native layers.

Stand-ins replace Transformer Engine's classes: same arguments as transformer-engine 2.11.0, computed with torch on a CPU.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_layouts import case
from tests.support.megatron_models import LENGTHS, write_model
from tests.support.megatron_runs import cases, check_weights, checkpoint_tensors, log_probs_of, selected
from tests.support.trainer_processes import run_cases

NATIVE, ENGINE = "tests.support.megatron_worker", "tests.support.transformer_engine_ranks"
SIGNATURES = Path(__file__).parents[1] / "stand_ins" / "nvidia" / "signatures.json"
CASES = [
    case("qwen3_moe", "TP1", slow=False),
    case("qwen3", "TP2", slow=True),
    case("qwen3_moe", "TP2xEP2", slow=True),
    case("deepseek_v3", "TP1", slow=True),
    case("deepseek_v3", "TP2", slow=True),
    case("deepseek_v3", "TP2xEP2", slow=True),
    case("gemma3_text", "TP1", slow=True),
    case("gemma3_text", "TP2", slow=True),
    case("deepseek_v32", "TP1", slow=True),
    case("gpt_oss", "TP1", packing=False, slow=True),
    case("gpt_oss", "TP2", packing=False, slow=True),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with models/ and each worker's results."""
    directory = tmp_path_factory.mktemp("transformer_engine")
    cases = selected(request, CASES)
    for model in sorted({chosen["model"] for chosen in cases}):
        write_model(model, directory / "models")
    native = [case(model, "TP1") for model in sorted({chosen["model"] for chosen in cases})]
    for module, some in ((NATIVE, native), (ENGINE, cases)):
        for chosen in some:
            output = directory / module / chosen["name"]
            output.mkdir(parents=True)
            placed = {**chosen, "model": str(directory / "models" / chosen["model"])}
            run_cases(module, chosen["processes"], [placed], output, 600)
    return directory


@pytest.mark.slow
@pytest.mark.stack
@cases(CASES)
def test_transformer_engine_equals_native_layers(results: Path, case: dict[str, Any]) -> None:
    output, native = results / ENGINE / case["name"], results / NATIVE / case["reference"]
    rows, expected = log_probs_of(output, case["name"]), log_probs_of(native, native.name)
    assert sorted(rows) == sorted(expected) == list(range(len(LENGTHS)))
    for number, reference in expected.items():
        for value, native_value in zip(rows[number], reference, strict=True):
            torch.testing.assert_close(value, native_value, atol=5e-6, rtol=0)
    got = torch.load(output / f"{case['name']}.pt", weights_only=True)
    native_values = torch.load(native / f"{native.name}.pt", weights_only=True)
    for metrics, native_metrics in zip(got["metrics"], native_values["metrics"], strict=True):
        assert metrics == pytest.approx(native_metrics, rel=2e-6)
    check_weights(got["after"], native_values["after"], checkpoint_tensors(results / "models" / case["model"]))


def test_recorded_signatures_equal_the_source() -> None:
    """MEGARL_TRANSFORMER_ENGINE names the unpacked wheel of transformer-engine."""
    place = os.environ.get("MEGARL_TRANSFORMER_ENGINE")
    if place is None:
        pytest.skip("MEGARL_TRANSFORMER_ENGINE names no unpacked wheel of transformer-engine")
    signatures: dict[str, dict[str, set[str]]] = {}
    recorded = json.loads(SIGNATURES.read_text())["classes"]
    for file in Path(place, "transformer_engine", "pytorch").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in recorded and "ops" not in file.parts:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in recorded[node.name]:
                        arguments = [*method.args.args[1:], *method.args.kwonlyargs]
                        signatures.setdefault(node.name, {})[method.name] = {argument.arg for argument in arguments}
    assert signatures == {
        name: {method: {*signature["required"], *signature["optional"]} for method, signature in methods.items()}
        for name, methods in recorded.items()
    }
