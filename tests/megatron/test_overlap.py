"""Overlapped communication (`megatron.ddp`) changes no result: updates, log-probs, the reference policy, offloading,
checkpoints and resumes. Over gloo, in real trainer processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_models import write_model
from tests.support.trainer_processes import run_cases

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SMALL = {"bucket_size": 4000}
"""Parameters: the tiny models then have several buckets."""


def case(model: str, name: str, ddp: dict[str, Any], **more: Any) -> dict[str, Any]:
    megatron = {**more.pop("megatron", {}), "ddp": ddp}
    return {"name": f"{model}-{name}", "model": model, "per_micro": 2, "megatron": megatron, **more}


def compare(tmp_path: Path, off: dict[str, Any], on: dict[str, Any], processes: int, *, same_norm: bool) -> None:
    """Assert that each rank's results are bit-identical.

    Several buckets change the shards of a rank, so that the gradient norm sums the same squares in another order
    (`same_norm`: False). Without clipping the norm does not change the update.
    """
    for rank in range(processes):
        expected, other = (torch.load(tmp_path / f"{case['name']}.{rank}.pt") for case in (off, on))
        assert not expected["pending"] and other["pending"] == on["megatron"]["ddp"].get("overlap_param_gather", False)
        for left, right in zip(expected["metrics"], other["metrics"], strict=True):
            assert (left is None) == (right is None)
            if left is not None and not same_norm:
                assert left.pop("actor/grad_norm") == pytest.approx(right.pop("actor/grad_norm"), rel=1e-5)
            assert left == right
        for name in ("log_probs", "reference"):
            for (left, _), (right, _) in zip(expected[name] or [], other[name] or [], strict=True):
                assert torch.equal(left, right), name
        for left, right in zip(expected["weights"], other["weights"], strict=True):
            assert left.keys() == right.keys()
            assert [name for name in left if not torch.equal(left[name], right[name])] == []
        assert expected["weights"][0].keys() and not torch.equal(
            *(expected["weights"][at]["lm_head.weight"] for at in (0, 2))
        )


def run(tmp_path: Path, processes: int, cases: list[dict[str, Any]]) -> None:
    for model in {case["model"] for case in cases}:
        write_model(model, tmp_path / "models")
    run_cases(
        "tests.support.overlap_worker",
        processes,
        [{**case, "model": str(tmp_path / "models" / case["model"])} for case in cases],
        tmp_path,
    )


@pytest.mark.slow
def test_two_data_parallel_ranks_with_experts(tmp_path: Path) -> None:
    off, on = case("qwen3_moe", "off", {}), case("qwen3_moe", "on", BOTH | SMALL)
    run(tmp_path, 2, [off, on])
    compare(tmp_path, off, on, 2, same_norm=False)
    result = torch.load(tmp_path / f"{on['name']}.0.pt")
    assert result["groups"] > 3 and result["early"] == result["groups"], (
        "gradients were reduced after the backward pass"
    )
    assert torch.load(tmp_path / f"{off['name']}.0.pt")["early"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, processes, megatron, ddp",
    [
        ("qwen3", 4, {"pipeline_parallel": 2}, BOTH | SMALL),
        ("qwen3", 4, {"pipeline_parallel": 2}, BOTH | {"align_param_gather": True}),
        ("qwen3_moe", 4, {"pipeline_parallel": 2, "virtual_pipeline": 2}, BOTH | {"align_param_gather": True}),
        ("qwen3_moe", 4, {"expert_parallel": 2, "tensor_parallel": 2}, BOTH | SMALL),
        ("deepseek_v3", 2, {"recompute": "full"}, BOTH | SMALL),
        ("qwen3", 2, {"distributed_optimizer": False}, {"overlap_grad_reduce": True} | SMALL),
        ("qwen3", 2, {"context_parallel": 2}, BOTH | SMALL),
    ],
    ids=["PP2", "PP2-aligned", "PP2xVPP2", "TP2xEP2", "MLA", "all-reduce", "CP2"],
)
def test_more_layouts(
    model: str, processes: int, megatron: dict[str, Any], ddp: dict[str, Any], tmp_path: Path
) -> None:
    off, on = (case(model, name, some, megatron=megatron) for name, some in (("off", {}), ("on", ddp)))
    run(tmp_path, processes, [off, on])
    compare(tmp_path, off, on, processes, same_norm=False)


@pytest.mark.slow
def test_overlap_with_one_bucket_keeps_norm_and_clipping(tmp_path: Path) -> None:
    off, on = (case("qwen3_moe", name, ddp, clip_grad=0.5) for name, ddp in (("off", {}), ("on", BOTH)))
    run(tmp_path, 2, [off, on])
    compare(tmp_path, off, on, 2, same_norm=True)
