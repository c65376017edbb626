"""Routing of advantages from the critic's shards to the actor's, and time-sharing of the devices."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batching.plan import plan_step, routes
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup, CriticGroup
from megarl.types import Group, InlineData, Sample
from megarl.weight_sync.placement import Colocated, Occupant


def batch(lengths: list[int], truncated: set[int]) -> list[Group]:
    groups = []
    for number, pair in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        samples = [
            Sample(number, i, InlineData([]), 1, n, n, reward=n, finish_reason="length" if n in truncated else "stop")
            for i, n in enumerate(pair)
        ]
        groups.append(Group(number, "", "", samples))
    return groups


@settings(deadline=None)  # the first example pays for imports
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12, unique=True),
    critics=st.integers(1, 4),
    actors=st.integers(1, 4),
)
def test_every_sample_in_the_loss_is_routed_once(lengths: list[int], critics: int, actors: int) -> None:
    recipe, view = Recipe(), Recipe()
    recipe.algorithm.advantage = view.algorithm.advantage = "gae"
    recipe.algorithm.overlong.filter = view.algorithm.overlong.filter = True
    recipe.actor.mini_batches, view.actor.mini_batches = 2, 3
    recipe.actor.max_tokens_per_micro_batch, view.actor.max_tokens_per_micro_batch = 60, 90
    lengths = [*lengths, *(100 + n for n in lengths)]
    groups = batch(lengths, truncated={lengths[0]})
    sources = plan_step(groups, view, critics, 1).shards
    targets = plan_step(groups, recipe, actors, 1).shards
    sample_routes = routes(sources, targets)
    arrived = []
    for source, row in zip(sources, sample_routes, strict=True):
        for target, route in zip(targets, row, strict=True):
            for sent, received in zip(route.source, route.target, strict=True):
                assert source.samples[sent].number == target.samples[received].number
                assert source.samples[sent].reward == source.samples[sent].length - 1
                assert source.samples[sent].loss_weight and target.samples[received].loss_weight
                arrived.append(source.samples[sent].number)
    assert sorted(arrived) == [number for number in range(len(lengths)) if number != 0]


class Recorder:
    """Stand-in workers or engine that record the methods called."""

    def __init__(self, name: str, calls: list[str]):
        self.name, self.calls = name, calls

    def call(self, method: str, *args: Any) -> Future[None]:
        self.calls.append(f"{self.name}.{method}")
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.fixture
def calls() -> list[str]:
    return []


def colocated(calls: list[str], *, actor_leaves: bool, critic_leaves: bool) -> Colocated:
    workers: Any = {name: Recorder(name, calls) for name in ("actor", "critic", "engine")}
    actor = Occupant(ActorGroup(workers["actor"], Recipe()), offload=actor_leaves)
    critic = Occupant(CriticGroup(workers["critic"], Recipe()), offload=critic_leaves)
    actor.offload()
    critic.offload()

    def publish(version: int) -> dict[str, float]:
        calls.append("publish")
        return {}

    engines, sleep = [EngineHandle(workers["engine"])], {"engines_sleep": True, "engines_asleep": True}
    devices = Colocated(actor, critic, engines, publish, **sleep, start_timeout=9.0)
    calls.clear()
    return devices


def test_only_one_model_occupies_the_devices(calls: list[str]) -> None:
    turns = colocated(calls, actor_leaves=True, critic_leaves=True)
    turns.update_engines(0)
    assert calls == [
        "actor.onload", "actor.offload_optimizer", "engine.wake", "publish", "actor.offload_weights", "engine.wake",
    ]  # fmt: skip
    calls.clear()
    turns.give_to_critic()
    assert calls == ["engine.sleep", "critic.onload"]
    calls.clear()
    turns.give_to_actor()
    assert calls == ["critic.offload_optimizer", "critic.offload_weights", "actor.onload"]
    calls.clear()
    turns.give_to_critic()  # to save it
    turns.give_to_actor()
    assert calls == [
        "actor.offload_optimizer", "actor.offload_weights", "critic.onload",
        "critic.offload_optimizer", "critic.offload_weights", "actor.onload",
    ]  # fmt: skip
    calls.clear()
    turns.give_to_actor()
    assert calls == []


def test_models_without_offload_stay_on_the_devices(calls: list[str]) -> None:
    turns = colocated(calls, actor_leaves=False, critic_leaves=False)
    for turn in (turns.give_to_critic, turns.give_to_actor, lambda: turns.update_engines(1), turns.give_to_critic):
        turn()
    assert calls == ["engine.wake", "publish", "engine.wake", "engine.sleep"]


def test_requests_wait_while_trainers_compute(calls: list[str]) -> None:
    """Engines that cannot sleep pause (CPUs); an engine that sleeps stops its requests itself."""
    workers: Any = {name: Recorder(name, calls) for name in ("actor", "engine")}
    actor = Occupant(ActorGroup(workers["actor"], Recipe()), offload=False)
    for sleeps, expected in (
        (False, ["engine.pause", "publish", "engine.resume"]),
        (True, ["engine.sleep", "engine.wake", "publish", "engine.wake"]),
    ):
        devices = Colocated(
            actor, None, [EngineHandle(workers["engine"])], lambda version: calls.append("publish") or {},  # type: ignore[func-returns-value]
            engines_sleep=sleeps, engines_asleep=False, requests_wait=True, start_timeout=9.0,
        )  # fmt: skip
        calls.clear()
        devices.give_to_actor()
        devices.give_to_actor()
        devices.update_engines(1)
        assert calls == expected
