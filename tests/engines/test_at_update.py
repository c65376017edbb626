"""Settings of engines that take new weights while requests run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.engines.base import EngineSpec
from megarl.engines.specs import policy_spec
from megarl.engines.vllm import args, scheduling
from megarl.errors import RecipeError
from megarl.recipe.schema import Recipe


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(tmp_path)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, request: str) -> None:
    """Make `request` the installed vLLM's v1/request.py."""
    (folder / "v1").mkdir()
    (folder / "v1" / "request.py").write_text(request)
    monkeypatch.setattr(scheduling, "package_folder", lambda _: folder)


def test_the_rule_of_the_recipe_is_that_of_its_engines() -> None:
    recipe = Recipe()
    recipe.model.path, recipe.cluster.placement, recipe.rollout.max_staleness = "model", "disaggregated", 1
    assert policy_spec(recipe, "e0", updated=True).at_update == "refresh"
    recipe.rollout.at_update = "keep"
    assert policy_spec(recipe, "e0", updated=True).at_update == "keep"
    assert policy_spec(recipe, "e0", updated=False).at_update == "drain", "never updated"


@pytest.mark.parametrize(
    ("rule", "request_source", "expected"),
    [
        ("drain", "discard_latest_async_tokens = False", None),
        ("refresh", "num_stale_output_tokens = 0", None),
        ("refresh", "discard_latest_async_tokens = False", False),  # 0.18
        ("keep", "num_stale_output_tokens = 0", False),
    ],
)
def test_asynchronous_scheduling_is_off_where_it_would_lose_or_mislabel_a_token(
    rule: str, request_source: str, expected: bool | None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(args, "fields", dict)  # no check of argument names
    installed(tmp_path, monkeypatch, request_source)
    spec = EngineSpec("e0", model, "float32", 64, at_update=rule)  # type: ignore[arg-type]
    assert args.build_engine_args(spec, "cuda").get("async_scheduling") is expected
    mine = EngineSpec("e0", model, "float32", 64, at_update=rule, engine_args={"async_scheduling": True})  # type: ignore[arg-type]
    if expected is None:
        assert args.build_engine_args(mine, "cuda")["async_scheduling"] is True
    else:
        for check in (args.build_engine_args, args.check_plan):
            with pytest.raises(RecipeError, match=f"with rollout.at_update={rule} and this version of vLLM"):
                check(mine, "cuda")


@pytest.mark.parametrize(
    ("tensor_parallel", "buffer", "expected"),
    [(1, True, False), (2, True, None), (1, False, None)],  # 2: workers in other processes; without the buffer: 0.23
)
def test_asynchronous_scheduling_is_off_where_routed_experts_stay_in_flight(
    tensor_parallel: int,
    buffer: bool,
    expected: bool | None,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(args, "fields", dict)
    installed(tmp_path, monkeypatch, "num_stale_output_tokens = 0")
    if buffer:
        (tmp_path / "distributed" / "aux_output_connector").mkdir(parents=True)
    common = {"tensor_parallel": tensor_parallel, "return_routed_experts": True}
    spec = EngineSpec("e0", model, "bfloat16", 64, **common)
    assert args.build_engine_args(spec, "cuda").get("async_scheduling") is expected
    mine = EngineSpec("e0", model, "bfloat16", 64, engine_args={"async_scheduling": True}, **common)
    if expected is False:
        with pytest.raises(RecipeError, match=r"routing_replay=rollout and rollout\.tensor_parallel=1"):
            args.build_engine_args(mine, "cuda")
    else:
        assert args.build_engine_args(mine, "cuda")["async_scheduling"] is True
