"""Adapters: every layout trains as one process does, and PEFT and transformers give the trainer's log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import megatron_layouts
from tests.support.megatron_models import reference_model, write_model
from tests.support.megatron_runs import (
    cases,
    checkpoint_tensors,
    launch,
    log_probs_of,
    of_transformers,
    rows_of,
    selected,
)

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(1800),  # the first test waits for all launches
    # PEFT's own rewriting of expert adapters leaves patterns behind that match nothing.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
]

ALL = {"rank": 4, "alpha": 16.0}
SOME = {**ALL, "targets": ["k_proj", "o_proj", "up_proj"]}  # a part of what Megatron fuses
PLACES = {**ALL, "targets": ["kv_a_proj_with_mqa", "shared_experts.up_proj", "mlp.down_proj"]}


def lora(model: str, layout: str, lora: dict[str, Any] = ALL, *, slow: bool = False, **more: Any) -> dict[str, Any]:
    """A case of tests/support/megatron_layouts.py with adapters; `more` are keys of the recipe's megatron section."""
    kind = {id(ALL): "all", id(SOME): "some", id(PLACES): "places"}[id(lora)]
    case = megatron_layouts.case(model, layout, slow=slow, **more)
    name, reference = (f"lora-{kind}-{case[key]}" for key in ("name", "reference"))
    return {**case, "name": name, "reference": reference, "lora": lora}


def exported(model: str, settings: dict[str, Any] = ALL, **more: Any) -> dict[str, Any]:
    return {**lora(model, "TP1", settings, **more), "export": True}


ONE = [
    {**exported("qwen3_moe"), "resume": True},
    exported("deepseek_v3"),
    exported("deepseek_v3", PLACES),
    exported("qwen2_tied", slow=True),
    exported("qwen3", slow=True),
    exported("qwen3", SOME, slow=True),
    exported("moonlight", slow=True),
    exported("llama"),
    exported("mistral", slow=True),
    exported("kimi_k2", slow=True),
    exported("glm4_moe", slow=True),
    exported("glm4_moe_lite", slow=True),
]
MORE = [
    lora("qwen3_moe", "TP2xEP2"),
    lora("qwen3_moe", "TP2xETP2"),
    lora("qwen3_moe", "PP2xVPP2", recompute="full"),
    lora("deepseek_v3", "TP2"),
    lora("deepseek_v3", "CP2", slow=True),
    lora("deepseek_v3", "TP2xEP2", slow=True, recompute="selective"),
    lora("deepseek_v3", "TP2", PLACES, slow=True),
    lora("deepseek_v3", "TP2xPP2xEP2", slow=True),
    lora("moonlight", "TP2xEP2", slow=True),
    lora("qwen2_tied", "PP2", slow=True),
    lora("qwen3", "CP2", slow=True, distributed_optimizer=False),
    lora("qwen3", "TP2", slow=True, sequence_parallel=False),
    lora("qwen3", "TP2", SOME, slow=True),
    lora("qwen3_moe", "DP2", slow=True),
    lora("qwen3_moe", "TP2", slow=True),
    {**lora("qwen3_moe", "EP2", slow=True), "resume": True},
    {**lora("qwen3_moe", "PP2xVPP2", slow=True), "resume": True},
    {**lora("qwen3_moe", "TP2xEP2xETP2", slow=True), "resume": True},
    lora("qwen3_moe", "TP2xPP2xVPP2xEP2", slow=True),
]


def resharded(layout: str, *, slow: bool = False) -> dict[str, Any]:
    """A case that resumes from the checkpoint of one process; the worker has the assertions."""
    case, source = lora("qwen3_moe", layout, slow=slow), "lora-all-qwen3_moe-TP1"
    return {**case, "name": f"{case['name']}-reshard", "kind": "reshard", "from": source, "root": source}


IN_WORKERS = [
    resharded("TP2xEP2", slow=True),
    resharded("TP2xETP2", slow=True),
    resharded("PP2xVPP2", slow=True),
    {**lora("qwen3_moe", "EP2", slow=True), "name": "lora-bf16", "dtype": "bfloat16", "resume": True},
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    cases = selected(request, [*ONE, *MORE, *IN_WORKERS])
    for model in {case["model"] for case in cases}:
        write_model(model, directory / "models")
    for processes in (1, 2, 4):
        launch(processes, [case for case in cases if case["processes"] == processes], directory)
    return directory


@cases(IN_WORKERS)
def test_workers_saved_a_checkpoint_after_their_checks(results: Path, case: dict[str, Any]) -> None:
    """The workers assert loading other layouts' checkpoints, and resuming in bfloat16."""
    assert (results / f"{case['name']}.checkpoint").is_dir()


@cases(ONE, MORE)
def test_training_does_not_depend_on_the_layout(results: Path, case: dict[str, Any]) -> None:
    base, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["reference"], case["name"]))
    original = checkpoint_tensors(results / "models" / case["model"])
    before = checkpoint_tensors(results / f"{case['name']}.hf")
    assert before.keys() == original.keys()
    assert all(torch.equal(before[name], weight) for name, weight in original.items()), "B starts at 0"
    for number, (log_probs, *_) in log_probs_of(results, case["name"]).items():
        expected, *_ = of_transformers(results / "models" / case["model"])[number]
        torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)

    # A loss of 0.1 is a float32 sum of terms around 1 and of both signs: its rounding is theirs.
    for metrics, expected in zip(got["metrics"], base["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=2e-6, abs=5e-7), "a loss or gradient norm depends on the layout"
    for name, weight in base["after"].items():
        torch.testing.assert_close(got["after"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    adapters, expected = (
        load_file(results / f"{name}.adapter" / "adapter_model.safetensors")
        for name in (case["name"], case["reference"])
    )
    assert adapters.keys() == expected.keys()
    for name, matrix in expected.items():
        torch.testing.assert_close(adapters[name], matrix, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@cases(ONE)
def test_only_targets_are_trained(results: Path, case: dict[str, Any]) -> None:
    got = torch.load(results / f"{case['name']}.pt", weights_only=True)
    before = checkpoint_tensors(results / f"{case['name']}.hf")
    changed = {name for name, weight in got["after"].items() if not torch.equal(weight, before[name])}
    targets = case["lora"].get("targets")
    linears = {name for name in got["after"] if name.endswith("proj.weight") or "proj_with" in name}
    trained = {name for name in linears if not targets or name.endswith(tuple(f"{t}.weight" for t in targets))}
    assert changed == trained


@cases(ONE)
def test_exports_compute_the_trainers_log_probs(results: Path, case: dict[str, Any]) -> None:
    """Exports tested: the merged model with transformers, and the starting model with the adapter with PEFT."""
    import peft

    trained = torch.load(results / f"{case['name']}.trained.pt", weights_only=True)
    merged = torch.cat([rows for rows, *_ in of_transformers(results / f"{case['name']}.merged")])
    torch.testing.assert_close(merged, trained, atol=2e-5, rtol=0)
    start = results / "models" / case["model"]
    untrained = torch.cat([rows for rows, *_ in of_transformers(start)])
    assert not torch.allclose(untrained, trained, atol=1e-3, rtol=0), "training changed next to nothing"
    adapter = results / f"{case['name']}.adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(start)
    with_adapter = peft.PeftModel.from_pretrained(reference_model(start), str(adapter))
    adapted = torch.cat([rows for rows, *_ in rows_of(with_adapter)])
    torch.testing.assert_close(adapted, trained, atol=2e-5, rtol=0)
