"""Engines of recipes with train.deterministic: their environment, their graphs, and the notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import load_recipe
from megarl.engines import engine_env
from megarl.engines.base import EngineSpec
from megarl.engines.specs import first_specs
from megarl.engines.vllm import ascend
from megarl.engines.vllm.args import build_engine_args, check_plan
from megarl.platform.base import Platform
from megarl.platform.cpu import CPUPlatform
from megarl.platform.cuda import CUDAPlatform
from megarl.platform.environment import RoleSettings, users_first
from megarl.platform.npu import NPUPlatform
from megarl.preflight.environment import environment_notices

GRPO = Path(__file__).parents[2] / "recipes" / "grpo_qwen3_8b.yaml"
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
NPU = {**INVARIANT, "HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}


@pytest.mark.parametrize(
    ("platform", "expected"), [(NPUPlatform(), NPU), (CUDAPlatform(), INVARIANT), (CPUPlatform(), {})]
)
def test_deterministic_engines_get_the_platforms_variables(platform: Platform, expected: dict[str, str]) -> None:
    plain, fixed = (engine_env("vllm", platform.engines_env(deterministic), 1, {}) for deterministic in (False, True))
    assert {name: value for name, value in fixed.items() if name not in plain} == expected
    assert {name: fixed[name] for name in plain} == plain


def test_a_users_variable_is_overridden_with_a_notice() -> None:
    users = {"VLLM_BATCH_INVARIANT": "0", "HCCL_DETERMINISTIC": "false"}
    assert users_first(NPU, users) == NPU
    text = " ".join(RoleSettings("engines", NPU).notices(users))
    assert (
        "VLLM_BATCH_INVARIANT=0, which is overridden" in text
        and "HCCL_DETERMINISTIC=false, which is overridden" in text
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_has_a_notice(deterministic: bool) -> None:
    recipe = load_recipe(GRPO, [f"train.deterministic={deterministic}".lower()])
    matching = [notice for notice in environment_notices(recipe, NPUPlatform()) if "batch-invariant" in notice]
    assert bool(matching) is deterministic
    assert not [notice for notice in environment_notices(recipe, CPUPlatform()) if "batch-invariant" in notice]
    assert {spec.deterministic for _, spec in first_specs(recipe, training=True)} == {deterministic}


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [
        ({}, {"cudagraph_mode": "PIECEWISE"}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"cudagraph_mode": "NONE"}),
        ({"compilation_config": {"mode": 3}}, {"mode": 3, "cudagraph_mode": "PIECEWISE"}),
        ({"enforce_eager": True}, None),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "PIECEWISE or NONE"),
        ({"compilation_config": 3}, "must be a mapping"),
    ],
)
def test_full_graphs_are_refused_on_an_npu(
    engine_args: dict[str, Any], expected: Any, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packaging.version import Version

    monkeypatch.setattr(ascend, "running", lambda: Version("0.23.0"))
    monkeypatch.setattr(ascend, "installed", lambda: Version("0.23.0"))
    spec = EngineSpec(
        "engine0", f"{quickstart_data}/model", "bfloat16", 64, engine_args=engine_args, deterministic=True
    )
    if isinstance(expected, str):
        for refuse in (build_engine_args, check_plan):
            with pytest.raises(ValueError, match=expected):
                refuse(spec, "npu")
        return
    check_plan(spec, "npu")
    assert build_engine_args(spec, "npu").get("compilation_config") == expected
    assert "compilation_config" not in build_engine_args(
        EngineSpec("engine0", f"{quickstart_data}/model", "bfloat16", 64), "npu"
    )
