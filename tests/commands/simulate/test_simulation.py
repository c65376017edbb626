"""The simulator: identities computed by hand, the lag bound, and that every group is trained on once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from megarl.commands.simulate.engine import Costs, FinishedSample, VirtualEngine
from megarl.commands.simulate.lengths import DrawnLengths, LogNormal
from megarl.commands.simulate.outcome import Outcome
from megarl.commands.simulate.simulation import AsyncSchedule, Simulation
from megarl.recipe.derived.at_update import UpdateRule, max_lag
from tests.support.estimate_cases import recipe


class Fixed(DrawnLengths):
    """Responses of one length, but for the groups in `exceptions`."""

    def __init__(self, length: int, samples: int, exceptions: Mapping[int, int] | None = None) -> None:
        self._length, self._count, self._exceptions = length, samples, exceptions or {}

    def of(self, group: int) -> list[int]:
        return [self._exceptions.get(group, self._length)] * self._count


def costs(engines: int = 1, most: int = 64, token: float = 1.0, request: float = 0.0, **changes: float) -> Costs:
    """A decode step takes `token` + `request` x running requests; everything else is free unless `changes` has it."""
    decode = token + request * np.arange(most + 1)
    return Costs(engines=engines, decode=decode, **{"prefill": 0.0, "training": 0.0, "weight_sync": 0.0, **changes})


def schedule(rule: UpdateRule, max_staleness: int, prompts: int, window: int = 1) -> AsyncSchedule:
    return AsyncSchedule(rule, max_staleness, prompts, window)


# --- one engine ------------------------------------------------------------------------------------------------------


def test_requests_share_an_engine() -> None:
    """Two requests of 4 and 10 tokens: 4 steps of 1 + 2 x 0.5 seconds together, then 6 of 1.5 seconds."""
    engine = VirtualEngine(costs(request=0.5))
    engine.add(0, [4, 10])
    assert engine.next_finish() == pytest.approx(8)
    engine.advance(8)
    assert [sample.length for sample in engine.finish()] == [4]
    assert engine.next_finish() == pytest.approx(8 + 6 * 1.5)
    engine.advance(17)
    assert [sample.length for sample in engine.finish()] == [10] and engine.next_finish() is None
    assert engine.busy == pytest.approx(17) and engine.request_seconds == pytest.approx(2 * 8 + 9)


def test_a_full_engine_lets_requests_wait() -> None:
    engine = VirtualEngine(costs(most=2))
    engine.add(0, [5, 5, 3])
    engine.advance(5)
    assert len(engine.finish()) == 2
    assert engine.next_finish() == pytest.approx(8)


def test_tokens_have_the_versions_that_sampled_them() -> None:
    engine = VirtualEngine(costs())
    engine.add(7, [10])
    engine.advance(4)
    engine.update(1, 5.0, refresh=False)
    assert engine.next_finish() == pytest.approx(4 + 5 + 6)
    engine.advance(15)
    assert engine.finish() == [FinishedSample(7, 10, 6.0, 0)]


def test_refresh_computes_prompts_and_tokens_again_and_keep_nothing() -> None:
    """Prompts of 3 tokens; at the update the requests have 4 and 2 tokens: 3 + 4 + 3 + 2 tokens of 0.1 seconds."""
    for refresh, tokens in ((True, 12), (False, 0)):
        engine = VirtualEngine(costs(prefill=0.1, prompt=3.0))
        engine.add(0, [10])
        engine.advance(0.3 + 2)
        engine.add(1, [10])
        engine.advance(0.3 + 2 + 0.3 + 2)
        engine.update(1, 1.0, refresh=refresh)
        assert engine.recomputed == pytest.approx(tokens)
        assert engine.next_finish() == pytest.approx(4.6 + 1 + 0.1 * tokens + 6)


def test_the_age_of_a_cache_counts_from_its_last_refresh() -> None:
    engine = VirtualEngine(costs())
    assert engine.oldest_cache() == 0
    engine.add(0, [10])
    engine.update(1, 1.0, refresh=False)
    engine.add(1, [10])
    assert engine.oldest_cache() == 0
    engine.update(2, 1.0, refresh=True)
    assert engine.oldest_cache() == 2
    engine.update(3, 1.0, refresh=False)
    assert engine.oldest_cache() == 2


def test_refresh_after_recomputes_old_caches_only() -> None:
    """Responses of 2 tokens, and one of 30 every eighth group: it meets many updates."""
    runs = {}
    for limit in (None, 2, 1):
        part = costs(1, prefill=0.001, prompt=3.0, training=0.01)
        aged = replace(schedule("keep", 4, 2, window=4), refresh_after=limit)
        runs[limit] = Simulation(part, aged, Fixed(2, 1, dict.fromkeys(range(0, 200, 8), 30)), 1).run(20, 2).recomputed
    assert runs[None] == 0 < runs[2] < runs[1]


def test_samples_share_the_prefill_of_their_prompt() -> None:
    for shares, prefills in ((True, 1), (False, 3)):
        engine = VirtualEngine(costs(prefill=0.1, prompt=20.0, shares_prefix=shares))
        engine.add(0, [5, 5, 5])
        assert engine.next_finish() == pytest.approx(5 + 2 * prefills)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """2 engines, 4 groups of 2: each engine decodes 4 requests, 10 steps of 1 + 4 x 0.25 seconds, after 2 prefills of 8."""
    part = costs(2, request=0.25, prefill=0.5, prompt=8.0, training=0.1, weight_sync=3.0, hand_over=2.0)
    outcome = Simulation(part, schedule("drain", 0, 4), Fixed(10, 2), 2).run(5, 1)
    sampling, training = 10 * 2 + 2 * 8 * 0.5, 2 + 0.1 * (80 + 64)
    assert outcome.step_seconds == pytest.approx(sampling + training + 3)
    assert outcome.waited == pytest.approx(sampling) and outcome.training == pytest.approx(training)
    assert outcome.engines_idle == pytest.approx(training / outcome.step_seconds)
    assert outcome.trainers_idle == pytest.approx(sampling / outcome.step_seconds)
    assert outcome.lag_mean == pytest.approx(0) and (outcome.lag_max, outcome.pending_samples) == (0, 8)
    assert outcome.pending_tokens == 80 + 64


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_free_training_overlaps_staleness_plus_1_batches(staleness: int) -> None:
    """A decode step takes the same time for any number of requests, so S + 1 batches take the time of one."""
    for rule in ("refresh", "keep"):
        simulation = Simulation(costs(2, most=999), schedule(rule, staleness, 4), Fixed(60, 2), 2)
        outcome = simulation.run(4 * (staleness + 1), staleness + 1)
        assert outcome.step_seconds == pytest.approx(60 / (staleness + 1))
    drained = Simulation(costs(2, most=999), schedule("drain", staleness, 4), Fixed(60, 2), 2).run(8, staleness + 1)
    assert drained.step_seconds == pytest.approx(60)


def test_slow_trainers_set_the_step() -> None:
    part = costs(2, training=1.0, weight_sync=3.0)
    outcome = Simulation(part, schedule("keep", 2, 4), Fixed(10, 2), 2).run(6, 3)
    assert outcome.step_seconds == pytest.approx(80 + 3) and outcome.trainers_idle == 0
    assert outcome.lag_mean == pytest.approx(2) and outcome.lag_max == 2


def test_drain_costs_the_longest_response() -> None:
    """One group of 4 is ten times longer, and no step is shorter than it; refresh only needs it at the batch's end."""
    longest = {number: 100 for number in range(0, 4000, 4)}
    part = costs(4, training=0.01)
    drain = Simulation(part, schedule("drain", 4, 4), Fixed(10, 1, longest), 1).run(20, 5)
    assert drain.step_seconds >= 100
    keep = Simulation(part, schedule("keep", 4, 4), Fixed(10, 1, longest), 1).run(20, 5)
    assert keep.step_seconds == pytest.approx(100 / 5, rel=0.1)


def test_colocated_engines_stop_while_trainers_compute() -> None:
    """1 engine, batches of a group; responses of 10 tokens, and of 30 every second group. At the update after the first batch
    (10 tokens), group 1 has 10 tokens of 30 and a prompt of 5, and computes them again."""
    part = costs(prefill=0.1, prompt=5.0, training=0.1, weight_sync=3.0, hand_over=2.0)
    plan = replace(schedule("refresh", 1, 1), colocated=True)
    simulation = Simulation(part, plan, Fixed(10, 1, dict.fromkeys(range(1, 99, 2), 30)), 1)
    outcome = simulation.run(2, 0)
    first = 2 * 0.5 + 10  # two prefills
    trained = 2 + 0.1 * 15
    second = 0.5 + 0.1 * 15 + 20  # the prompt of group 2, and group 1's cache
    assert [record.end for record in simulation.records] == pytest.approx(
        [first + trained + 3, first + trained + 3 + second + 2 + 0.1 * 35 + 3]
    )
    assert outcome.recomputed > 0 and outcome.lag_max == 1


def test_a_weight_sync_waits_for_an_engine_that_loads() -> None:
    """Two engines with finish and S = 1. The engine that has no groups when version 1 arrives loads it for 50 seconds; trainers
    have batch 2 before that, and wait for the rest of the load."""
    part = costs(2, training=0.1, weight_sync=3.0, load=50.0)
    simulation = Simulation(part, schedule("finish", 1, 2), Fixed(10, 1), 1)
    simulation.run(6, 0)
    syncs = [record.weight_sync for record in simulation.records]
    assert min(syncs) == 3 and max(syncs) > 3
    free = Simulation(replace(part, load=0.0), schedule("finish", 1, 2), Fixed(10, 1), 1)
    free.run(6, 0)
    assert {record.weight_sync for record in free.records} == {3.0}


@pytest.mark.parametrize(("staleness", "prompts", "window"), [(1, 4, 1), (1, 4, 2), (2, 3, 5), (4, 2, 3), (1, 2, 4)])
def test_the_bound_of_the_lag_is_reached(staleness: int, prompts: int, window: int) -> None:
    """The last group of the first admission ends only when no later group may overtake it any more."""
    late = (staleness + 1) * prompts - 1
    lengths = Fixed(10, 1, {late: 10 * (window + 8)})
    simulation = Simulation(costs(1, most=999, training=0.01), schedule("keep", staleness, prompts, window), lengths, 1)
    outcome = simulation.run(4 * (staleness + 2), 0)
    assert simulation.trained.index(late) == late + window - 1
    assert outcome.lag_max == staleness + math.ceil((window - 1) / prompts)


@pytest.mark.parametrize("rule", ["drain", "finish", "refresh", "keep"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("staleness", [0.5, 1, 2, 5])
def test_no_group_is_lost_and_the_lag_is_bounded(rule: UpdateRule, share: float, staleness: float) -> None:
    settings = recipe(
        cluster__placement="disaggregated",
        rollout__at_update=rule,
        rollout__max_staleness=staleness,
        rollout__window=share,
        data__prompts_per_step=16,
    )
    plan = AsyncSchedule.of(settings)
    for seed in range(3):
        lengths = DrawnLengths(LogNormal(300, 3000, 4000), 4, seed)
        part = costs(4, most=24, request=0.02, prefill=1e-3, prompt=50.0, training=0.002, weight_sync=5.0, load=20.0)
        simulation = Simulation(part, plan, lengths, 4)
        outcome = simulation.run(20, 0)
        assert outcome.lag_max <= plan.max_lag == max_lag(settings)
        assert len(simulation.trained) == 20 * 16 == len(set(simulation.trained))
        admission = simulation.admission
        in_batches = [item for batch in [admission.tried, *admission.closed] for item in batch]
        finished = [item.group.number for item in [*admission.waiting(), *in_batches]]
        everything = sorted([*simulation.trained, *finished, *admission.unfinished()])
        assert everything == list(range(admission.state.admitted))
        assert all(place - number < plan.window for place, number in enumerate(simulation.trained))
        assert all(number - place < (staleness + 1) * 16 for place, number in enumerate(simulation.trained))
        assert outcome.trained_length == pytest.approx(
            np.mean([lengths.of(number) for number in simulation.trained]), rel=1e-9
        )
        assert 0 <= outcome.engines_idle < 1 and 0 <= outcome.trainers_idle < 1


# --- against the literature's schedules ------------------------------------------------------------------------------


def math_run(rule: UpdateRule, staleness: int, share: float = 0.0, devices: int = 128, steps: int = 40) -> Outcome:
    """Lengths of mathematics (median 3,000, 99th percentile 30,000, at most 32,768), half of the devices for engines of
    four; synchronous runs use all devices for both, and hand them over in 10 seconds."""
    part = 1.0 if staleness == 0 else 0.5
    prompts = devices // 2
    operations = Costs(
        engines=int(devices * part) // 4,
        decode=0.015 + 0.0001 * np.arange(257),
        prefill=1 / 20000,
        training=1 / (1000 * devices * part),
        weight_sync=5.0,
        load=5.0,
        hand_over=0.0 if staleness else 10.0,
    )
    window = max(1, math.floor(share * (staleness + 1) * prompts))
    lengths = DrawnLengths(LogNormal(3000, 30000, 32768), 16, 0)
    return Simulation(operations, schedule(rule, staleness, prompts, window), lengths, 16).run(steps, 2 * staleness + 2)


def test_long_tails_drain_gains_little_and_updates_in_flight_much() -> None:
    """The figures of a simulation without megarl's admission and loop: drain 1.05, keep 1.82, 2.45 and 3.71; finish
    1.74, 2.35 and 2.89, without equal shares of the groups. Keep with a window: 4.58."""
    synchronous = math_run("drain", 0)

    def gain(rule: UpdateRule, staleness: int, share: float = 0.0) -> float:
        outcome = math_run(rule, staleness, share)
        assert abs(outcome.length_bias) < 0.02
        return outcome.tokens_per_second / synchronous.tokens_per_second

    assert 1.0 < gain("drain", 1) < 1.15 and 1.0 < gain("drain", 4) < 1.15
    kept = {staleness: gain("keep", staleness) for staleness in (1, 2, 4)}
    assert kept == {
        1: pytest.approx(1.82, rel=0.12),
        2: pytest.approx(2.45, rel=0.12),
        4: pytest.approx(3.71, rel=0.12),
    }
    finished = {staleness: gain("finish", staleness) for staleness in (1, 2, 4)}
    assert finished == {
        1: pytest.approx(1.75, rel=0.05),
        2: pytest.approx(2.4, rel=0.05),
        4: pytest.approx(3.65, rel=0.05),
    }
    refreshed, windowed = gain("refresh", 4), gain("keep", 4, 0.3)
    assert 0.85 * kept[4] < refreshed < kept[4] < windowed


@pytest.mark.slow
def test_growth() -> None:
    """128 engines, 8,192 samples a step, 50 steps. Seconds of this process alone: other tests may run at the same time."""
    begin = time.process_time()
    outcome = math_run("refresh", 4, 0.3, devices=1024, steps=40)
    assert time.process_time() - begin < 60
    assert outcome.lag_max <= 6
