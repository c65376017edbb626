"""Errors in the settings of engine groups, and the rendezvous that their engines receive."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megarl import engines
from megarl.cluster.calls import wait_for_all
from megarl.cluster.device_map import Demand, place
from megarl.engines.base import EngineSpec, GroupRank
from megarl.engines.vllm.args import build_engine_args, check_engine_args
from megarl.preflight.engines import check_experts
from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.rollout.engine_handle import EngineHandle, with_engine_check
from megarl.rollout.start_engines import load_engines
from tests.support.stack import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["rollout.engines=3", "rollout.data_parallel=2"], "data_parallel", "3 do not divide into groups of 2"),
        (["rollout.data_parallel=0"], "data_parallel", "must be at least 1"),
        (
            ["rollout.engines=2", "rollout.data_parallel=2", "rollout.expert_parallel=false"],
            "expert_parallel",
            "exist only to spread experts",
        ),
    ],
)
def test_refusals(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert caught.value.key == f"rollout.{key}" and words in str(caught.value)


MOE = {"num_experts": 8}


@pytest.mark.parametrize(
    ("rollout", "config", "key", "words"),
    [
        ({"expert_parallel": True}, {}, "expert_parallel", "no experts to spread"),
        ({"data_parallel": 2}, {}, "data_parallel", "no experts to spread"),
        ({"data_parallel": 3}, MOE, "data_parallel", "8 experts do not divide over .* 3 x 1 = 3 devices"),
        ({"data_parallel": 4, "tensor_parallel": 4}, MOE, "data_parallel", "4 x 4 = 16 devices"),
        ({"tensor_parallel": 3, "expert_parallel": True}, MOE, "expert_parallel", "1 x 3 = 3 devices"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(
    rollout: dict[str, Any], config: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        check_experts(RolloutConfig(**rollout), config)
    assert caught.value.key == f"rollout.{key}"


def test_experts_that_can_be_spread_are_accepted() -> None:
    for rollout in ({}, {"tensor_parallel": 3}, {"expert_parallel": False}):
        check_experts(RolloutConfig(**rollout), {})
    for rollout in ({"data_parallel": 4, "tensor_parallel": 2}, {"tensor_parallel": 4, "expert_parallel": True}):
        check_experts(RolloutConfig(**rollout), {"text_config": MOE})


def test_an_engine_without_groups_is_refused_with_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_GROUPS", ("other",))
    engines.check_groups("vllm", 1)
    with pytest.raises(ValueError, match=r"rollout.data_parallel is 2.*'vllm' form no groups.*rollout.engine to other"):
        engines.check_groups("vllm", 2)


@pytest.mark.parametrize(
    ("name", "section", "instead"),
    [
        ("enable_expert_parallel", "rollout", "set rollout.expert_parallel instead"),
        ("data_parallel_size", "rollout", "set rollout.data_parallel instead"),
        ("data_parallel_rank", "rollout", "set rollout.data_parallel instead"),
        ("data_parallel_size", "teacher", "megarl sets it"),
    ],
)
def test_engine_args_that_contradict_the_recipe_are_refused(name: str, section: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"{section}\.engine_args\.{name} cannot be set: {instead}"):
        check_engine_args({name: 2}, section)


def test_a_teacher_can_spread_the_experts_of_each_engine() -> None:
    check_engine_args({"enable_expert_parallel": True}, "teacher")


def test_vllm_receives_expert_parallel_and_executor_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    common = {"name": "e0", "model_path": str(tmp_path), "dtype": "float32", "max_model_len": 8}
    for tensor, data, spread in ((1, 1, False), (1, 2, True), (2, 2, True), (2, 1, True)):
        spec = EngineSpec(**common, tensor_parallel=tensor, data_parallel=data, expert_parallel=spread)
        arguments = build_engine_args(spec, "cuda")
        assert arguments.get("enable_expert_parallel", False) is spread
        # A single worker runs in the engine's process: requests enter whole, and weights need no second copy.
        # Several are this process's children. vLLM would choose Ray in an actor, and wait for devices that the actor holds.
        expected = "mp" if tensor == 2 else "uni" if data == 2 else None
        assert arguments.get("distributed_executor_backend") == expected


class Service:
    """Record calls; return the values in `answers`, by method."""

    def __init__(self, number: int, answers: dict[str, Any]) -> None:
        self.name, self.address, self.calls, self.answers = f"engine{number}", f"10.0.0.{number}", [], answers

    def call(self, method: str, *args: Any) -> Future[Any]:
        self.calls.append((method, *args))
        future: Future[Any] = Future()
        if isinstance(answer := self.answers.get(method), Exception):
            future.set_exception(answer)
        elif method in self.answers:
            future.set_result(answer)
        return future


def handles(services: list[Any]) -> list[EngineHandle]:
    return [EngineHandle(service) for service in services]


def recipe_of(engines: int, data_parallel: int) -> Recipe:
    recipe = Recipe()
    recipe.rollout.engines, recipe.rollout.data_parallel, recipe.rollout.start_timeout = engines, data_parallel, 5.0
    return recipe


def test_each_group_opens_its_rendezvous_at_its_first_engine() -> None:
    services: Any = [Service(n, {"open_rendezvous": GroupRank(f"10.0.0.{n}", 7000 + n)}) for n in range(4)]
    assert len(load_engines(recipe_of(4, 2).rollout, handles(services))) == 4
    assert [service.calls for service in services] == [
        [("open_rendezvous", "10.0.0.0"), ("start", GroupRank("10.0.0.0", 7000, 0, 2))],
        [("start", GroupRank("10.0.0.0", 7000, 1, 2))],
        [("open_rendezvous", "10.0.0.2"), ("start", GroupRank("10.0.0.2", 7002, 0, 2))],
        [("start", GroupRank("10.0.0.2", 7002, 1, 2))],
    ]


def test_single_engines_open_no_rendezvous() -> None:
    services: Any = [Service(n, {}) for n in range(2)]
    load_engines(recipe_of(2, 1).rollout, handles(services))
    assert [service.calls for service in services] == [[("start",)], [("start",)]]


def test_a_failed_engine_is_raised_before_the_engines_that_wait_for_it() -> None:
    """The first engine would wait for the second, which could not load, until start_timeout."""
    waiting: Future[Any] = Future()
    failed: Future[Any] = Future()
    failed.set_exception(MemoryError("no room"))
    services: Any = [Service(0, {}), Service(1, {})]
    with pytest.raises(MemoryError, match="no room"):
        wait_for_all(services, [waiting, failed], doing="load", key="rollout.start_timeout", limit=30.0)


@pytest.mark.timeout(10)
def test_a_failure_without_requests_is_raised_by_the_check() -> None:
    calls: list[None] = []
    services: Any = [Service(0, {}), Service(1, {})]
    check = with_engine_check(handles(services), lambda: calls.append(None))
    check()
    services: Any = [Service(0, {}), Service(1, {"watch": RuntimeError("engine 'engine1' died")})]
    with pytest.raises(RuntimeError, match="'engine1' died"):
        with_engine_check(handles(services), lambda: calls.append(None))()
    assert len(calls) == 2  # a dead process is reported first


def test_a_group_can_span_machines_and_an_engine_cannot() -> None:
    demand = Demand(trainers=0, engines=4, tensor_parallel=2)
    plan = place([("a", 4), ("b", 4)], demand, "devices")
    assert [[machine for machine, _ in engine] for engine in plan.engines] == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_text_instead_of_a_number_is_refused_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument types are checked by megarl where vLLM is not installed."""
    monkeypatch.setattr("megarl.engines.vllm.args.fields", dict)
    with pytest.raises(RecipeError, match="it must be a number"):
        check_engine_args({"gpu_memory_utilization": "0.9"})
