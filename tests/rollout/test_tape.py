"""The tape of a run: batches, assignment to engines and saved states repeat, whenever groups arrive."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.tape import ReplayError
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.rollout.tape import (
    TAPE_FORMAT,
    Arrivals,
    ReplayPlan,
    RunTape,
    TapeSegment,
    history,
    other_format,
    segments_of,
)
from megarl.types import Group, InlineData, Prompt, Sample
from tests.rollout.test_source import FakeService, Prompts

STEPS, PROMPTS_PER_STEP = 8, 4


class SlowService(FakeService):
    """Answers each request after a random time. `rewards`: of a group's second sample."""

    def __init__(self, order: random.Random, reward: float = 1.0) -> None:
        super().__init__()
        self.order, self.reward = order, reward

    def answer_to(self, number: int) -> Future[Any]:
        done: Future[Any] = Future()
        threading.Timer(self.order.random() * 0.03, self._answer, (done, number)).start()
        return done

    def _answer(self, done: Future[Any], number: int) -> None:
        rewards = (0.0, self.reward)
        samples = [Sample(number, i, InlineData([]), 3, 10 + number, 10 + i, reward=rewards[i]) for i in range(2)]
        done.set_result((Group(number, f"row/{number}", "test", samples, None, ()), InlineData([])))


class LoadingService(SlowService):
    """Receives weights with `received`, and loads them after a random time. `repeated`: the versions of a recorded run's
    loads, which the engine's tape repeats; None: the newest that it has received."""

    def __init__(self, order: random.Random, repeated: list[int] | None = None) -> None:
        super().__init__(order)
        self.received, self.repeated, self.loads = 0, repeated, list[int]()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "submit":
            return super().call(method, *arguments)
        assert method == "load_weights"
        done: Future[Any] = Future()
        threading.Timer(self.order.random() * 0.03, self._load, (done,)).start()
        return done

    def _load(self, done: Future[Any]) -> None:
        self.loads.append(self.received if self.repeated is None else self.repeated[len(self.loads)])
        done.set_result(self.loads[-1])


def recipe(**rollout: Any) -> Recipe:
    result = Recipe()
    result.data.prompts_per_step, result.rollout.samples_per_prompt, result.train.steps = PROMPTS_PER_STEP, 2, STEPS
    result.rollout.max_response_length, result.rollout.timeout = 100, 20
    result.cluster.placement, result.rollout.max_staleness, result.rollout.window = "disaggregated", 2, 0.5
    result.algorithm.overlong.penalty_buffer = 0
    for name, value in rollout.items():
        setattr(result.rollout, name, value)
    return result


def source_of(services: list[Any], arrivals: Arrivals[Any] | None, settings: Recipe | None = None) -> EnginesSource:
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    engines = [EngineHandle(service) for service in services]
    return EnginesSource(settings or recipe(), prompts, engines, [0], lambda: None, arrivals)  # type: ignore[arg-type]


def header(segment: int = 0, after: int = 0, resumed: int | None = None, unlogged: bool = False) -> dict[str, Any]:
    return {"segment": segment, "after": after, "resumed": resumed, "unlogged": unlogged, "identity": {}}


def play(
    source: EnginesSource, order: random.Random, saves: tuple[int, ...] = (3, 6), update: float = 0.0
) -> tuple[list[Any], list[Any]]:
    """Take all batches as the loop does; returns the numbers of each batch, and the saved states without their groups.
    update: seconds that the training on a batch takes."""
    batches, states = [], []
    for step in range(1, STEPS + 1):
        source.admit(step - 1)
        batches.append([group.number for group in source.take(PROMPTS_PER_STEP).groups])
        if step in saves:
            threading.Event().wait(order.random() * 0.02)
            state = source.state()
            waiting = [item.group.number for item in state["waiting"]]
            gathered = [[item.group.number for item in batch] for batch in state["gathered"]]
            states.append((state["counters"], gathered, waiting, state["unfinished"]))
        threading.Event().wait(update)
    source.close()
    return batches, states


def played(folder: Path, seed: int, plan: ReplayPlan | None = None, recorded: Path | None = None, **kwargs: Any) -> Any:
    order = random.Random(seed)
    folder.mkdir(exist_ok=True)
    services = [SlowService(order) for _ in range(2)]
    tape = RunTape(folder, header(), recorded, plan)
    batches, states = play(source_of(services, tape.arrivals()), order, **kwargs)
    return batches, states, [service.waves for service in services]


def test_a_replay_repeats_batches_engines_and_saved_states(tmp_path: Path) -> None:
    batches, states, waves = played(tmp_path / "recorded", seed=1)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    assert plan.last_step is None and plan.segment.ended
    for seed in range(2, 6):
        folder = tmp_path / f"replay{seed}"
        again, repeated_states, repeated_waves = played(folder, seed, plan, tmp_path / "recorded")
        assert again == batches and repeated_states == states
        assert [list(chain(*of_engine)) for of_engine in repeated_waves] == [
            list(chain(*of_engine)) for of_engine in waves
        ]
        assert (folder / "controller.jsonl").read_bytes() == (tmp_path / "recorded" / "controller.jsonl").read_bytes()


def finished(
    folder: Path, seed: int, plan: ReplayPlan | None = None, loads: list[list[int]] | None = None
) -> tuple[list[list[int]], list[LoadingService]]:
    """Play a run with `rollout.at_update: finish`; returns its batches and its engines."""
    order = random.Random(seed)
    folder.mkdir()
    services = [LoadingService(order, loads and loads[index]) for index in range(2)]
    tape = RunTape(folder, header(), folder.with_name("recorded"), plan)
    settings = recipe(at_update="finish")
    source = source_of(services, tape.arrivals(), settings)
    batches = []
    for step in range(1, STEPS + 1):
        for service in services:
            threading.Event().wait(order.random() * 0.02)
            service.received = step - 1
        if step == 4:
            source.load_newest(step - 1)
            assert all(service.loads[-1] == step - 1 for service in services)
        source.admit(step - 1)
        batches.append([group.number for group in source.take(PROMPTS_PER_STEP).groups])
    source.close()
    return batches, services


def test_a_replay_with_finish_repeats_engines_and_the_order_of_their_loads(tmp_path: Path) -> None:
    """Loaded versions decide the engine and the version of the next groups."""
    batches, services = finished(tmp_path / "recorded", seed=1)
    waves, loads = [service.waves for service in services], [service.loads for service in services]
    (plan,) = history(segments_of(tmp_path / "recorded"))
    assert plan.last_step is None and all(len(of_engine) > 2 for of_engine in loads)
    assert sum("newest" in record for record in plan.segment.records) == 1
    for seed in range(2, 6):
        again, repeated = finished(tmp_path / f"replay{seed}", seed, plan, loads)
        assert again == batches
        for service, recorded in zip(repeated, loads, strict=True):  # the last load may not end before the run
            assert len(service.loads) >= len(recorded) - 1 and service.loads == recorded[: len(service.loads)]
        assert [list(chain(*service.waves)) for service in repeated] == [list(chain(*each)) for each in waves]


def test_other_moments_give_other_engines_with_finish(tmp_path: Path) -> None:
    """The test above can fail."""
    runs = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        _, services = finished(tmp_path / str(seed) / "run", seed)
        runs.append([list(chain(*service.waves)) for service in services])
    assert any(run != runs[0] for run in runs)


def test_a_load_of_another_version_ends_the_replay(tmp_path: Path) -> None:
    """The tape of the engine belongs to another run."""
    _, services = finished(tmp_path / "recorded", seed=1)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    loads = [[7] * len(service.loads) for service in services]
    with pytest.raises(
        ReplayError, match=r"engine \d has loaded version 7 of the weights, in the recorded run version \d"
    ):
        finished(tmp_path / "replay", 2, plan, loads)


def test_a_tape_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "controller.jsonl").write_text(
        '{"segment":0,"after":0,"resumed":null,"unlogged":false,"identity":{}}\n{"version":1}\n'
    )
    (old,) = history(segments_of(tmp_path))
    assert old.segment.format == 1 and "segment 0 of the tape has format 1, of an earlier megarl" in str(
        other_format([old])
    )
    new = ReplayPlan(replace(old.segment, format=TAPE_FORMAT + 1), 1)
    assert "of a later megarl" in str(other_format([new]))
    assert other_format([ReplayPlan(replace(old.segment, format=TAPE_FORMAT), 1)]) is None


def test_other_moments_give_other_batches_without_a_replay(tmp_path: Path) -> None:
    """The test above can fail."""
    runs = [played(tmp_path / str(seed), seed)[0] for seed in range(4)]
    assert any(run != runs[0] for run in runs)


def test_a_replay_may_leave_saves_out(tmp_path: Path) -> None:
    """Also with groups that arrived between a save and the next version."""
    batches, _, _ = played(tmp_path / "recorded", seed=1, saves=tuple(range(1, STEPS)), update=0.04)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    records = plan.segment.records
    assert any("saved" in record and "group" in after for record, after in pairwise(records))
    again, _, _ = played(tmp_path / "replay", 2, plan, tmp_path / "recorded", saves=(), update=0.04)
    assert again == batches


def test_a_replay_may_save_where_the_recorded_run_did_not(tmp_path: Path) -> None:
    batches, _, _ = played(tmp_path / "recorded", seed=1)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    again, states, _ = played(tmp_path / "replay", 2, plan, tmp_path / "recorded", saves=(5,))
    assert again == batches and len(states) == 1, "a save that was not recorded has no place to wait for"


def test_a_group_with_another_reward_ends_the_replay(tmp_path: Path) -> None:
    played(tmp_path / "recorded", seed=1)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    (tmp_path / "replay").mkdir()
    tape = RunTape(tmp_path / "replay", header(), tmp_path / "recorded", plan)
    source = source_of([SlowService(random.Random(2), reward=0.5) for _ in range(2)], tape.arrivals())
    with pytest.raises(ReplayError, match=r"group \d+ has .* other rewards, than in the recorded run"):
        play(source, random.Random(2))


@pytest.mark.parametrize(
    ("cut_at", "missing"),
    [("group", "record of a group, but .* ends here"), ("version", r"a version 4, but .* ends here")],
)
def test_a_tape_that_is_too_short_ends_the_replay(tmp_path: Path, cut_at: str, missing: str) -> None:
    """A machine lost power, and its last writes. The replay does not wait for `rollout.timeout`."""
    played(tmp_path / "recorded", seed=1, saves=())
    (plan,) = history(segments_of(tmp_path / "recorded"))
    records = list(plan.segment.records)
    end = records.index({"version": 0}) + 1 if cut_at == "group" else records.index({"version": 4})
    short = ReplayPlan(replace(plan.segment, records=records[:end]), plan.last_step)
    with pytest.raises(ReplayError, match=rf"{missing}") as error:
        played(tmp_path / "replay", 2, short, tmp_path / "recorded", saves=())
    assert "segment 0 of" in str(error.value) and "recorded/controller.jsonl" in str(error.value)


def test_a_batch_that_needs_more_groups_than_recorded_ends_the_replay() -> None:
    arrivals: Arrivals[Any] = Arrivals(recorded=[{"saved": 0}, {"group": 3}, {"saved": 1}, {"version": 1}])
    arrivals.check_more_groups()
    next_is_version: Arrivals[Any] = Arrivals(recorded=[{"saved": 1}, {"version": 1}])
    with pytest.raises(ReplayError, match=r"record of a group, .* continues with \{\"version\": 1\} here"):
        next_is_version.check_more_groups()
    Arrivals().check_more_groups()


def test_a_killed_run_ends_its_replay_with_its_last_whole_step(tmp_path: Path) -> None:
    """Groups of the step that it abandoned may arrive after the last record."""
    played(tmp_path / "recorded", seed=1)
    (ended,) = history(segments_of(tmp_path / "recorded"))
    records = list(ended.segment.records)
    for end in range(records.index({"version": 3}) + 1, len(records), 3):
        killed = replace(ended.segment, records=records[:end])
        folder = tmp_path / f"replay{end}"
        folder.mkdir()
        tape = RunTape(folder, header(), tmp_path / "recorded", ReplayPlan(killed, killed.last_step))
        order = random.Random(end)
        source = source_of([SlowService(order) for _ in range(2)], tape.arrivals())
        for step in range(1, killed.last_step + 1):
            source.admit(step - 1)
            source.take(PROMPTS_PER_STEP)
            threading.Event().wait(order.random() * 0.02)
            if step in (3, 6):
                source.state()
        source.close()


def test_a_replay_that_stalls_names_the_engines_logs(tmp_path: Path) -> None:
    played(tmp_path / "recorded", seed=1)
    (plan,) = history(segments_of(tmp_path / "recorded"))
    (tmp_path / "replay").mkdir()

    class Stuck(SlowService):
        def _answer(self, done: Future[Any], number: int) -> None:
            if number != 2:
                super()._answer(done, number)

    tape = RunTape(tmp_path / "replay", header(), tmp_path / "recorded", plan)
    source = source_of([Stuck(random.Random(2)) for _ in range(2)], tape.arrivals(), recipe(timeout=0.5))
    with pytest.raises(
        RuntimeError, match=r"no group has finished .* The engines' logs .* name the event of the recorded run"
    ):
        play(source, random.Random(2))


def test_a_history_leaves_out_what_resumes_abandoned() -> None:
    """Killed after step 12 with a checkpoint of step 10; that start was killed, too, and 10 was resumed again."""

    def segment(
        number: int, after: int, resumed: int | None, *records: dict[str, Any], unlogged: bool = False
    ) -> TapeSegment:
        return TapeSegment(number, after, resumed, unlogged, {}, records)

    segments = [
        segment(0, 0, None, {"version": 0}, {"version": 12}),
        segment(1, 10, 0, {"version": 10}, {"version": 11}),
        segment(2, 10, 0, {"version": 10}, {"version": 20}, unlogged=True),
        segment(3, 20, 2, {"version": 20}, {"version": 22}),
    ]
    plans = history(segments)
    assert [(plan.segment.number, plan.last_step, plan.logs_last) for plan in plans] == [
        (0, 10, False),
        (2, 20, True),
        (3, 22, True),
    ]
    killed_at_once = segment(4, 22, 3, {"version": 22})
    assert history([*segments, killed_at_once])[-1] == ReplayPlan(segments[3], 22, True)
    ended = TapeSegment(4, 20, 2, False, {}, ({"version": 29}, {"ended": True}))
    assert history([*segments, ended])[-1] == ReplayPlan(ended, None)
    assert history([]) == []


def test_a_start_that_only_wrote_the_metrics_of_the_step_before_is_repeated() -> None:
    """Killed between checkpoint and metrics of step 4; the next start wrote the metrics and was killed, too."""
    first = TapeSegment(0, 0, None, False, {}, ({"version": 3},))
    wrote = TapeSegment(1, 4, 0, True, {}, ({"version": 4},))
    idle = TapeSegment(2, 4, 0, False, {}, ())
    rest = TapeSegment(3, 4, 0, False, {}, ({"version": 9}, {"ended": True}))
    plans = history([first, wrote, idle, rest])
    assert plans == [ReplayPlan(first, 4, False), ReplayPlan(wrote, 4), ReplayPlan(rest, None)]
    unlogged = TapeSegment(3, 4, 0, True, {}, ({"version": 9}, {"ended": True}))
    assert history([first, wrote, unlogged]) == [ReplayPlan(first, 4, False), ReplayPlan(unlogged, None)]


def test_a_failed_step_is_replayed_until_it_fails() -> None:
    """A bundle's tape: the run failed in step 4. No group follows, and the replay waits for the failure of an engine."""
    failed = TapeSegment(2, 2, 0, False, {}, ({"version": 2}, {"version": 3}, {"failed": 4}))
    assert history([failed]) == [ReplayPlan(failed, 4)]
    arrivals: Arrivals[Any] = Arrivals(recorded=[{"saved": 3}, {"failed": 4}])
    arrivals.check_more_groups()
    with pytest.raises(ReplayError, match=r"needs a further record of a newest 4, .* continues with \{\"failed\": 4\}"):
        arrivals.may_take({"newest": 4})
    tape = RunTape(Path("new"), header(), Path("recorded"), ReplayPlan(failed, 4))
    assert tape.of_engine("engine0").fails
    assert (
        not RunTape(Path("new"), header(), Path("recorded"), ReplayPlan(replace(failed, records=()), 3))
        .of_engine("e")
        .fails
    )


def test_a_history_begins_after_a_segment_that_is_not_on_the_tape() -> None:
    resumed = TapeSegment(1, 4, 0, False, {}, ({"version": 6},))
    assert history([resumed]) == [ReplayPlan(resumed, 6)]
    itself = TapeSegment(0, 4, 0, False, {}, ({"version": 6},))
    assert history([itself]) == [ReplayPlan(itself, 6)]


def test_a_last_start_that_only_wrote_the_metrics_of_the_last_step_is_repeated() -> None:
    """Killed between checkpoint and metrics of the last step, 4."""
    first = TapeSegment(0, 0, None, False, {}, ({"version": 3},))
    wrote = TapeSegment(1, 4, 0, True, {}, ())
    assert history([first, wrote]) == [ReplayPlan(first, 4, False), ReplayPlan(wrote, 4)]
