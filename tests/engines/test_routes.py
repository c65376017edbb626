"""The weight route is chosen and reported before the start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.commands.plan.count.types import Links
from megarl.commands.plan.routes import as_expected, expected_routes
from megarl.commands.plan.show.console import route_lines
from megarl.commands.plan.time.estimate import estimate
from megarl.engines.routes import WeightRoute, check_route, route_of, routes_of_sets
from megarl.engines.vllm.route_support import RouteSupport, support_of
from megarl.errors import RecipeError
from megarl.hf.published import read
from megarl.platform.device_table import device_named
from megarl.platform.kinds import kind_of
from tests.support import plans
from tests.support.estimate_cases import DEVICE, QWEN, recipe

UNKNOWN = RouteSupport("9.9.9", "installed", None, "vLLM 9.9.9 finishes a layer in another way")


@pytest.mark.parametrize(
    ("settings", "support", "name", "why"),
    [
        ({}, support_of("0.23.0"), "sharded", "weight_sync.route=auto"),
        ({}, None, "sharded", "the version of vLLM is not known here"),
        ({}, UNKNOWN, "full", "vLLM 9.9.9 finishes"),
        ({}, support_of("0.11.0"), "none", "no layerwise reload"),
        ({"weight_sync__route": "full"}, support_of("0.23.0"), "full", "the recipe says so"),
        ({"rollout__engine": "sglang"}, None, "full", "accepts only whole tensors"),
        ({"lora__rank": 8}, support_of("0.23.0"), "adapters", "where engines can hold them"),
        ({"lora__rank": 8, "weight_sync__adapters": "merged"}, support_of("0.23.0"), "full", "adapters are sent whole"),
    ],
)
def test_a_route_follows_from_recipe_and_version(
    settings: dict[str, Any], support: RouteSupport | None, name: str, why: str
) -> None:
    route = route_of(recipe(**settings), support, "a version")
    assert route.name == name and why in str(route)


def test_every_set_of_versions_has_a_route() -> None:
    routes = routes_of_sets(recipe(), kind_of("npu").sets)
    assert routes[0].name == "sharded" and "CANN 9.1.0 (vLLM 0.23.0)" in routes[0].on
    assert [route.name for route in routes if "vLLM 0.11.0" in route.on] == ["none"]


def test_the_route_of_a_range_is_that_of_its_oldest_version() -> None:
    """A plan for GPUs on a laptop: the extra `cuda` allows several versions."""
    (route,) = routes_of_sets(recipe(), kind_of("cuda").sets)
    assert route.name == "sharded" and route.on == "CUDA (vLLM 0.32.0)" and "not known" not in str(route)


def test_an_unsupported_route_is_refused_before_the_start() -> None:
    insists = recipe(weight_sync__route="sharded")
    with pytest.raises(
        RecipeError, match=r"(?s)weight_sync.route = 'sharded'.*do not support it on here: vLLM 9.9.9 finishes"
    ):
        check_route(insists, route_of(insists, UNKNOWN, "here"))
    with pytest.raises(RecipeError, match="engines cannot update their weights on here"):
        check_route(recipe(), route_of(recipe(), support_of("0.11.0"), "here"))
    check_route(recipe(), route_of(recipe(), UNKNOWN, "here"))
    check_route(recipe(train__source="sft"), route_of(recipe(), support_of("0.11.0"), "here"))


@pytest.mark.parametrize(
    ("settings", "support"),
    [
        ({"weight_sync__route": "full"}, support_of("0.32.0")),
        ({"weight_sync__transport": "files"}, support_of("0.32.0")),
        ({}, UNKNOWN),
    ],
)
def test_the_full_route_of_gpt_oss_is_refused_before_the_start(settings: dict[str, Any], support: RouteSupport) -> None:
    """It would fail in the first update, after all engines and trainers have started."""
    chosen = recipe(**settings)
    route = route_of(chosen, support, "here")
    with pytest.raises(RecipeError, match=r"(?s)weight_sync.route.*gpt_oss writes experts without.*route=sharded"):
        check_route(chosen, route, read("gpt-oss-20b"))
    check_route(chosen, route, read("Qwen3-30B-A3B"))
    check_route(recipe(), route_of(recipe(), support_of("0.32.0"), "here"), read("gpt-oss-20b"))


def test_train_has_a_notice_of_a_fallback_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.preflight import engines_and_devices as settings

    monkeypatch.setattr("megarl.engines.routes.installed_support", lambda: UNKNOWN)
    changed = recipe(rollout__engines=4, rollout__tensor_parallel=2, model__dtype="bfloat16")
    (notice,) = settings.route_notices(changed, read("Qwen3-8B"))
    assert "selects full on vLLM 9.9.9, installed here" in notice and "each of 8 engine ranks receives" in notice
    assert "15.3 GiB an update" in notice
    monkeypatch.setattr("megarl.engines.routes.installed_support", lambda: support_of("0.23.0"))
    assert settings.route_notices(changed, read("Qwen3-8B")) == []


def test_doctor_warns_about_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.commands.doctor.recipe import weights

    changed = recipe(data__train_files=["x"])
    monkeypatch.setattr("megarl.engines.routes.installed_support", lambda: UNKNOWN)
    (finding,) = weights(changed, "cpu")
    assert finding.status == "warning" and "vLLM 9.9.9 finishes" in finding.text
    changed.weight_sync.route = "sharded"
    assert weights(changed, "cpu")[0].status == "FAIL"


def test_a_plan_counts_the_expected_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.commands.plan.routes.routes_of_sets", lambda *_: [route_of(recipe(), UNKNOWN, "a set")])
    changed = recipe(cluster__device="npu")
    routes = expected_routes(changed, device_named("910B"))
    assert [route.name for route in routes] == ["full"]
    assert as_expected(changed, routes).weight_sync.route == "full" and changed.weight_sync.route == "auto"
    assert expected_routes(recipe(train__source="sft"), None) == []


def test_the_console_names_the_route_and_both_costs() -> None:
    links = Links("sharded", 10**6, 10**6, 10**6, 0)
    times = estimate(recipe(rollout__engines=8, cluster__trainers=8), {"rollout": QWEN}, DEVICE, links=links)
    assert set(times.weights) == {"sharded", "full"} and times.weights["full"] > 10 * times.weights["sharded"]
    phase = next(phase for phase in times.phases if phase.name == "weight_sync")
    assert times.weights["sharded"] == pytest.approx(phase.seconds)
    routes = [
        WeightRoute("sharded", "weight_sync.route=auto", "one"),
        WeightRoute("none", "too old", "two"),
        WeightRoute("sharded", "x", "three"),
    ]
    lines = route_lines(replace(plans.BARE, routes=routes, estimate=times, device=DEVICE))
    assert lines[0].startswith("weight route: sharded on one: weight_sync.route=auto; no route was measured")
    assert "full " in lines[1] and "sharded " in lines[1] and "0.1 GB/s" in lines[1]
    assert lines[2:] == ["  elsewhere: none on two: too old"]
