"""Over-sampling: steps do not wait for replacements, batches repeat, and no group is left out without a count."""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dynamic_sampling import Case, simulate
from megarl.preflight.recipe.algorithm import algorithm_errors
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import Admission, accepted_groups
from megarl.rollout.tape import ReplayPlan, RunTape, history, segments_of
from megarl.types import Group, InlineData, Sample, Span
from tests.rollout.test_source import FakeService
from tests.rollout.test_tape import header, source_of
from tests.rollout.test_tape import recipe as tape_recipe


def group(number: int, version: int) -> Group:
    samples = [Sample(number, 0, InlineData([]), 2, 8, 8, spans=(Span(0, version), Span(4, version + 1)))]
    return Group(number, f"row/{number}", "test", samples)


def passes(number: int, seed: int, share: float = 0.5) -> bool:
    return random.Random(f"{seed}/{number}").random() < share


def run(admission: Admission, seed: int, order: random.Random, versions: int, share: float = 0.5) -> list[list[int]]:
    """Return the numbers of the trained groups of each batch. Groups finish in the order that `order` draws."""
    trained, running = [], []
    for version in range(versions):
        admission.version = version
        while not (admission.closed and admission.idle()):  # drain
            running += [(number, version) for number in admission.start(admission.capacity())]
            assert running, "deadlock: nothing runs and nothing can start"
            number, started = running.pop(order.randrange(len(running)))
            admission.finish(group(number, started), passes(number, seed, share))
        trained.append([each.number for each in accepted_groups(admission.closed.popleft())])
    return trained


def test_two_groups_start_for_each_place_and_the_surplus_is_counted() -> None:
    admission = Admission(4, 0, 10, continuous=False, oversample=2.0)
    admission.version = 0
    assert list(admission.start(admission.capacity())) == list(range(8))
    for number in (7, 6, 0, 1, 2, 3):
        admission.finish(group(number, 0), True)
    assert [each.number for each in accepted_groups(admission.closed[0])] == [0, 1, 2, 3], (
        "the groups that started first"
    )
    assert admission.capacity() == 0 and admission.running == 2
    for number in (4, 5):
        admission.finish(group(number, 0), number == 4)
    unused = admission.take_unused()
    assert (unused.groups, unused.tokens) == (4, 40)
    assert admission.take_unused().groups == 0
    admission.closed.popleft()
    admission.version = 1
    assert admission.idle() is False and admission.capacity() == 8


def test_the_surplus_enters_the_next_batch_within_the_largest_lag() -> None:
    admission = Admission(4, 0.5, 10, continuous=False, oversample=2.0)
    admission.version = 0
    assert admission.capacity() == 12
    for number in admission.start(12):
        admission.finish(group(number, 0), number % 2 == 0)
    assert [each.number for each in accepted_groups(admission.closed.popleft())] == [0, 2, 4, 6]
    admission.version = 1
    assert admission.capacity() == 8, "two of the six places are taken"
    for number in admission.start(8):
        admission.finish(group(number, 1), number % 2 == 0)
    assert [each.number for each in accepted_groups(admission.closed.popleft())] == [8, 10, 12, 14]
    assert admission.take_unused().groups == 0


def test_groups_of_later_batches_are_not_replaced_before_the_next_version() -> None:
    """Their replacements would delay an update that waits for running groups."""
    admission = Admission(4, 1, 10, continuous=True, oversample=1.5)
    admission.version = 0
    for number in admission.start(admission.capacity()):  # 12
        admission.finish(group(number, 0), number < 5)
    assert len(admission.closed) == 1 and admission.capacity() == 0 and admission.idle()
    admission.version = 1
    assert admission.capacity() == 11  # seven places: one group of the second batch is there
    short = Admission(4, 1, 10, continuous=True, oversample=1.5)
    short.version = 0
    for number in short.start(short.capacity()):
        short.finish(group(number, 0), number < 2)
    assert short.capacity() == 3  # two places of the first batch
    ahead = Admission(4, 1, 10, continuous=True, oversample=1.5, drains=False)
    ahead.version = 0
    for number in ahead.start(ahead.capacity()):
        ahead.finish(group(number, 0), number < 5)
    assert ahead.capacity() == 5  # three places of the second batch: running groups delay no update


def test_tries_stay_within_their_limit() -> None:
    admission = Admission(4, 0, 3, continuous=True, oversample=2.5)
    admission.version = 0
    for number in admission.start(admission.capacity()):  # 10
        admission.finish(group(number, 0), False)
    assert admission.capacity() == 2
    for number in admission.start(2):
        admission.finish(group(number, 0), True)
    assert len(accepted_groups(admission.closed[0])) == 2 and len(admission.closed[0]) == 12


def test_nothing_is_kept_for_a_batch_after_the_last() -> None:
    admission = Admission(2, 1, 10, continuous=True, batches=1, oversample=2.0)
    admission.version = 0
    for number in admission.start(admission.capacity()):
        admission.finish(group(number, 0), True)
    assert admission.state.closed == 1 and admission.take_unused().groups == 2 and admission.idle()


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompts=st.integers(1, 6),
    staleness=st.sampled_from([0, 0.5, 1, 2]),
    oversample=st.sampled_from([1.0, 1.3, 2.0, 3.0]),
    continuous=st.booleans(),
    share=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_batches_repeat_for_any_order_and_every_group_is_trained_or_counted(
    seed: int, prompts: int, staleness: float, oversample: float, continuous: bool, share: float
) -> None:
    """Also: no sample exceeds the largest lag, and batches are in admission order."""
    runs = []
    for order in range(3):
        admission = Admission(prompts, staleness, 6, continuous, oversample=oversample)
        trained = run(admission, seed, random.Random(order), 5, share)
        unused = admission.take_unused()
        kept = len(admission.tried) + len(admission.waiting()) + sum(map(len, admission.closed))
        runs.append((trained, admission.state.admitted, unused.groups, kept))
        numbers = [number for batch in trained for number in batch]
        assert numbers == sorted(set(numbers))
    assert runs[0] == runs[1] == runs[2]


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000), window=st.integers(1, 9), staleness=st.sampled_from([0.5, 1, 2]), oversample=st.sampled_from([1.5, 3.0])
)  # fmt: skip
def test_the_lag_keeps_its_bound_while_weights_change_under_running_groups(
    seed: int, window: int, staleness: float, oversample: float
) -> None:
    order, prompts = random.Random(seed), 3
    admission = Admission(prompts, staleness, 8, continuous=True, window=window, oversample=oversample, drains=False)
    running: list[tuple[int, int]] = []
    seen: dict[int, int] = {}
    unused = 0
    for version in range(8):
        admission.version = version
        while not admission.closed:
            running += [(number, version) for number in admission.start(admission.capacity())]
            number, started = running.pop(order.randrange(len(running)))
            seen[number] = started
            admission.finish(group(number, started), order.random() < 0.9)
        for each in accepted_groups(admission.closed.popleft()):
            assert version - seen[each.number] <= math.ceil(staleness) + -(-(window - 1) // prompts)
        unused += admission.take_unused().groups
    assert admission.state.admitted >= 8 * prompts + unused


def next_place(admission: Admission) -> tuple[int, int, int]:
    """Return the batch of the next group, and the accepted and tried groups before it, by going through all groups."""
    size, most = admission.prompts_per_step, admission.prompts_per_step * (admission.max_attempts or 1)
    waiting = {item.group.number: item.accepted for item in admission.waiting()}
    batch, accepted, tried = admission.state.closed, len(accepted_groups(admission.tried)), len(admission.tried)
    for number in sorted({*admission.unfinished(), *waiting}):
        accepted, tried = accepted + waiting.get(number, True), tried + 1
        if accepted == size or tried == most:
            batch, accepted, tried = batch + 1, 0, 0
    return batch, accepted, tried


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompts=st.integers(1, 6),
    attempts=st.integers(1, 4),
    window=st.sampled_from([1, 4, 9]),
    staleness=st.sampled_from([0, 0.5, 2]),
    share=st.sampled_from([0.2, 0.5, 0.9]),
)
def test_the_next_place_is_that_of_a_scan_of_all_groups(
    seed: int, prompts: int, attempts: int, window: int, staleness: float, share: float
) -> None:
    order, running = random.Random(seed), list[int]()
    admission = Admission(prompts, staleness, attempts, continuous=True, window=window)
    for version in range(5):
        admission.version = version
        while not admission.closed:
            running += admission.start(admission.capacity())
            number = running.pop(order.randrange(len(running)))
            admission.finish(group(number, version), passes(number, seed, share))
            assert admission._position() == next_place(admission)
        admission.closed.popleft()


def small(case: Case, **more: Any) -> Any:
    return simulate(case, steps=4, engines=4, prompts=16, samples=4, **more)


def test_a_run_of_the_source_needs_no_second_wave_and_counts_what_it_leaves_out() -> None:
    """The source, its engines under a virtual clock: `rollout.max_staleness: 0`, half of the groups filtered."""
    whole, waves = small(Case("", filtered=False)), small(Case("", filtered=True))
    over = small(Case("", filtered=True, oversample=3.0))
    assert waves.step > 2.5 * whole.step and over.step < 1.8 * whole.step
    assert waves.unused == 0 and over.unused > 0.1 and over.most == 0
    kept = small(Case("", filtered=True, oversample=2.0, max_staleness=0.5, at_update="drain"))
    assert kept.unused < 0.1 and kept.most == 1 and kept.tried < over.tried


def test_the_batches_of_a_run_do_not_depend_on_the_engines() -> None:
    case = Case("", filtered=True, oversample=3.0, admission="continuous")
    few, many = (simulate(case, steps=3, engines=engines, prompts=16, samples=4) for engines in (2, 8))
    assert few.trained == many.trained and few.step > many.step


class HeldService(FakeService):
    """Answers a group, and loads weights, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Future[Any]] = {}

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "load_weights":
            self.load: Future[int] = Future()
            return self.load
        return super().call(method, *arguments)

    def answer_to(self, number: int) -> Future[Any]:
        return self.held.setdefault(number, Future())

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self._answer(self.held[number], number)


def oversampled(**rollout: Any) -> Recipe:
    recipe = tape_recipe(window=0, **rollout)
    recipe.train.steps = 2
    dynamic = recipe.algorithm.dynamic_sampling
    dynamic.enabled, dynamic.oversample = True, 2.0
    return recipe


def test_groups_that_run_after_the_last_batch_are_counted_and_not_on_the_tape(tmp_path: Path) -> None:
    service, recipe = HeldService(), oversampled(max_staleness=1, at_update="refresh")
    source = source_of([service], RunTape(tmp_path, header()).arrivals(), recipe)
    source.admit(0)
    assert sorted(service.held) == list(range(16))
    service.answer(*range(8), 9)
    first = source.take(4)
    source.admit(1)
    last = source.take(4)
    assert first.metrics["rollout/groups_unused"] == 0
    assert last.metrics["rollout/groups_unused"] == 8 and last.metrics["rollout/tokens_unused"] == 27  # of group 9
    source.close()
    service.answer(8, *range(10, 16))
    (segment,) = segments_of(tmp_path)
    assert segment.ended and history([segment]) == [ReplayPlan(segment, None)]
    assert [each["group"] for each in segment.records if "group" in each] == [*range(8), 9]
    assert len(service.held) == 16, "a finished group starts no other after the end"


def test_trainers_that_wait_for_surplus_groups_wait_for_engines() -> None:
    service = HeldService()
    source = source_of([service], None, oversampled(max_staleness=0))
    source.admit(0)
    service.answer(*range(4))
    threading.Timer(0.3, service.answer, range(4, 8)).start()
    batch = source.take(4)
    assert batch.metrics["rollout/wait_seconds/engines"] > 0.2 and batch.metrics["rollout/groups_unused"] == 4
    assert batch.metrics["rollout/wait_seconds/window"] == 0


def test_an_engine_that_loads_weights_after_the_last_batch_is_not_on_the_tape(tmp_path: Path) -> None:
    service, recipe = HeldService(), oversampled(max_staleness=1, at_update="finish")
    source = source_of([service], RunTape(tmp_path, header()).arrivals(), recipe)
    source.admit(0)
    service.answer(*range(16))
    source.take(4)
    source.admit(1)
    source.take(4)
    source.close()
    service.load.set_result(1)
    (segment,) = segments_of(tmp_path)
    assert segment.ended and not any("loaded" in each for each in segment.records)


@pytest.mark.parametrize(
    ("enabled", "oversample", "problem"),
    [(False, 2.0, "no group is filtered"), (True, 4.0, "3 times"), (True, 3.0, None)],
)
def test_settings_without_effect_are_refused(enabled: bool, oversample: float, problem: str | None) -> None:
    recipe = Recipe()
    dynamic = recipe.algorithm.dynamic_sampling
    dynamic.enabled, dynamic.oversample = enabled, oversample
    errors = [str(error) for error in algorithm_errors(recipe) if "oversample" in str(error)]
    assert (len(errors) == 1 and problem in errors[0]) if problem else not errors
