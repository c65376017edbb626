"""`weight_sync.route`: the requested route, or with `auto` a route that all processes support, with one notice of the reason."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup
from megarl.weight_sync.connect import open_weight_sync


class Trainers:
    def __init__(self, problem: str | None = None) -> None:
        self.problem, self.asked = problem, []

    def call(self, method: str, receivers: Any, route: str) -> list[Any]:
        assert method == "open_weight_sync" and receivers == [("e0/0", "h"), ("e1/0", "h")]
        self.asked.append(route)
        first: Any = route.encode()
        if route in ("sharded", "adapters") and self.problem:
            return [self.problem] * 2
        return [first, None]


class Engine:
    def __init__(self, name: str, problem: str | None = None) -> None:
        self.name, self.problem, self.joined = name, problem, []

    def call(self, method: str, session: bytes) -> Future[Any]:
        assert method == "connect_weight_sync"
        self.joined.append(session.decode())
        future: Future[Any] = Future()
        future.set_result(self.problem if session in (b"sharded", b"adapters") else None)
        return future


def opened(route: str, *, trainers: str | None = None, engine: str | None = None, **changes: Any) -> Any:
    recipe = Recipe()
    recipe.lora.rank = changes.get("rank", 0)
    recipe.weight_sync.check_every = changes.get("check_every", 0)
    recipe.weight_sync.silence = changes.get("silence", 8.0)
    recipe.weight_sync.adapters = changes.get("adapters", "merged" if route != "adapters" else "auto")
    recipe.weight_sync.route = "auto" if route == "adapters" else route  # type: ignore[assignment]
    group, services, notices = Trainers(trainers), [Engine("e0"), Engine("e1", engine)], []
    reasons = [None, changes.get("merged_because")]
    infos = [
        {"receivers": [[f"{service.name}/0", "h"]], "merged_because": why}
        for service, why in zip(services, reasons, strict=True)
    ]
    actor, engines = ActorGroup(group, recipe), [EngineHandle(service) for service in services]  # type: ignore[arg-type]
    session = open_weight_sync(recipe, actor, engines, infos, notices.append)
    assert all(service.joined[-1:] == [session.decode()] for service in services), (
        "every engine has joined the returned session"
    )
    return group.asked, notices


def test_an_explicit_route_is_used_or_fails_with_the_reason() -> None:
    assert opened("full", trainers="no", engine="no") == (["full"], [])
    assert opened("sharded") == (["sharded"], [])
    for problem in ({"trainers": "trainer rank 1: odd"}, {"engine": "odd"}):
        with pytest.raises(
            RuntimeError, match=r"weight_sync.route=sharded: (trainer rank |e)1: odd. Set weight_sync.route="
        ):
            opened("sharded", **problem)


def test_auto_uses_the_sharded_route_if_possible() -> None:
    routes, (notice,) = opened("auto")
    assert routes == ["sharded"] and notice.startswith("weight_sync.route=auto: sharded; ")


@pytest.mark.parametrize(
    ("problem", "expected", "words"),
    [
        ({"trainers": "trainer rank 1: odd"}, ["sharded", "full"], "because trainer rank 1: odd"),
        ({"engine": "its weights are quantized"}, ["sharded", "full"], "because e1: its weights are quantized"),
        ({"rank": 4}, ["full"], "because lora.rank=4: adapters are sent whole, and merged weights"),
        ({"rank": 4, "check_every": 5}, ["full"], "weight_sync.check_every=5 has no effect"),
        (
            {"engine": "odd", "check_every": 5, "silence": 60.0},
            ["sharded", "full"],
            "e1: odd; weight_sync.check_every=5 has no effect",
        ),
    ],
)
def test_auto_falls_back_to_the_full_route_with_the_reason(
    problem: dict[str, Any], expected: list[str], words: str
) -> None:
    routes, (notice,) = opened("auto", **problem)
    assert routes == expected
    assert notice.startswith("weight_sync.route=auto: full, not sharded, ") and words in notice


def test_only_adapters_are_sent_if_every_engine_holds_them() -> None:
    routes, (notice,) = opened("adapters", rank=4, check_every=3)
    assert routes == ["adapters"] and notice.startswith("weight_sync.adapters=auto: only adapters are sent; ")
    assert "has no effect" not in notice
    assert opened("adapters", rank=4, adapters="only") == (["adapters"], [])


@pytest.mark.parametrize(
    ("problem", "expected", "words"),
    [
        ({"merged_because": "it is a mixture"}, ["full"], "because e1: it is a mixture"),
        (
            {"merged_because": "odd", "check_every": 5},
            ["full"],
            "because e1: odd; weight_sync.check_every=5 has no effect",
        ),
        ({"engine": "odd"}, ["adapters", "full"], "because e1: odd"),
    ],
)
def test_merged_weights_are_sent_if_an_engine_holds_no_adapters(
    problem: dict[str, Any], expected: list[str], words: str
) -> None:
    routes, (notice,) = opened("adapters", rank=4, **problem)
    assert routes == expected
    assert (
        notice.startswith("weight_sync.adapters=auto: merged weights, exported, in every update, ") and words in notice
    )
    with pytest.raises(
        RuntimeError,
        match=f"weight_sync.adapters=only: {words[8:].split(';')[0]}. Set weight_sync.adapters=merged, or auto",
    ):
        opened("adapters", rank=4, adapters="only", **problem)


def test_auto_is_accepted_in_every_recipe() -> None:
    for override in ("lora.rank=4", "rollout.engine=sglang"):
        load_recipe("recipes/quickstart.yaml", ["weight_sync.route=auto", "weight_sync.check_every=2", override])
