"""The engine's log-probs are the trainer's, for the engine's own samples: real vLLM, real Megatron, real weight sync."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.numerics.engine_gap import MODELS, ONLY_BFLOAT16, Case, Gap, Result, measure, table

BOUND = 5e-5  # of each token's log-prob, in float32

LAYER = "model.layers.2."
CASES = [
    Case("qwen3_moe", updates=1, disturb=(f"{LAYER}mlp.experts.7.down_proj.weight",)),
    Case("deepseek_v3", updates=1, disturb=(f"{LAYER}mlp.gate.e_score_correction_bias",)),
    *(
        Case(model, temperature=0.8 if model == "qwen3" else 1.0, disturb=("*",) if Case(model).route == "full" else ())
        for model in MODELS
        if model not in ONLY_BFLOAT16
    ),
    *(
        Case(model, updates=2, processes=4, megatron={"tensor_parallel": 2, "expert_parallel": 2})
        for model in ("qwen3_moe", "deepseek_v3")
    ),
    Case("ernie4_5_moe", sharded=True),
]


def name(case: Case) -> str:
    layout = (f"{key}={value}" for key, value in case.megatron.items())
    return "-".join([case.model, *["sharded"] * case.sharded, *layout])


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_gap_is_small_after_start_and_updates(case: Case, tmp_path: Path) -> None:
    check(measure(case, tmp_path))


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_float16_is_nearer_than_bfloat16(tmp_path: Path) -> None:
    """float16 has three more bits of each number. The loss scale changes nothing that the engine receives."""
    half, brain = (measure(Case("qwen3", dtype, updates=2), tmp_path / dtype) for dtype in ("float16", "bfloat16"))
    assert max(gap.mean for gap in half.gaps) < min(gap.mean for gap in brain.gaps) / 3, (half, brain)
    assert half.stale.mean > 0.1, half


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_near(model: str, tmp_path: Path) -> None:
    """In bfloat16 only the mean gap has a bound, and a loose one: both sides round in different orders."""
    result = measure(Case(model, "bfloat16", updates=1), tmp_path)
    assert all(gap.mean < 0.1 < result.stale.mean for gap in result.gaps), result


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_float32_output_layer_changes_numbers_and_does_not_widen_the_gap(tmp_path: Path) -> None:
    """Same weights and seeds. The layers' roundings dominate the gap of tiny models; tests/engines/test_fp32_head.py shows that
    the engine computes its logits in float32, and tests/megatron/test_log_probs.py the trainer."""
    plain = measure(Case("qwen3", "bfloat16", updates=1), tmp_path / "plain")
    exact = measure(Case("qwen3", "bfloat16", updates=1, megatron={"fp32_head": True}), tmp_path / "fp32")
    for gap, other in zip(plain.gaps, exact.gaps, strict=True):
        assert other.mean != gap.mean and other.mean < 1.1 * gap.mean, (gap, other)


def check(result: Result) -> None:
    case, bound = result.case, f"the bound is {BOUND}: {result}"
    assert len(result.gaps) == case.updates + 1
    assert all(gap.tokens > 500 and gap.largest < BOUND for gap in result.gaps), bound
    assert result.least_change[0] > 1e-3, f"an update hardly moved {result.least_change[1]}: it could not be missed"
    assert bool(result.disturbed) == bool(case.disturb)
    for wrong in (result.stale, *result.disturbed):
        assert wrong.largest > 10 * BOUND, f"{wrong.label} was sent wrong, but the gap does not show it"


def test_table_sums_the_updates() -> None:
    gaps = [Gap("start", 100, 1e-6, 2e-6), Gap("update 1", 100, 1e-6, 3e-6), Gap("update 2", 300, 5e-6, 7e-6)]
    result = Result(Case("qwen3"), gaps, stale=gaps[0], disturbed=[], least_change=(1.0, "w"))
    assert table([result]).splitlines()[2] == "| qwen3 | float32 | 500 | 1.0e-06, 2.0e-06 | 4.0e-06, 7.0e-06 |"
