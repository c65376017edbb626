"""Engines that hang: the decision, and the fleet that replaces them (`rollout.step_timeout`)."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from megarl.cluster.failures import Failure, ProcessInfo, ServiceDied
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.environment import environment_notices
from megarl.preflight.recipe.fleet import step_timeout_notice
from megarl.recipe.schema import Recipe
from megarl.rollout.fleet import step_watch
from megarl.rollout.fleet.step_watch import LOOKS, StepWatch
from tests.support.dying_engines import Engines, source_of

ENGINE = (0, 0)


def causes(watch: StepWatch, *steps: int | None) -> list[str | None]:
    """Return the decision after each look that saw these steps."""
    return [watch.record(ENGINE, step, answered=True) for step in steps]


def test_an_engine_hangs_when_the_limit_of_looks_sees_the_same_step() -> None:
    first, *rest = [None] * LOOKS, "it hangs: its step 7 has not ended for 60 s (rollout.step_timeout)"
    assert causes(StepWatch(60, 600), *[7] * (LOOKS + 1)) == [*first, *rest]


@pytest.mark.parametrize(
    "steps",
    [
        [None] * 100,  # no requests, asleep, or in an update of any length
        [5, 5, 5, 5, 6, 6, 6, 6, 7],  # each step takes nearly the limit, as a long prefill in parts
        [5, 5, 5, 5, None, 5, 5, 5, 5],
        [1] * LOOKS * 10,  # the first step compiles
    ],
    ids=["idle", "slow", "interrupted", "first"],
)
def test_false_alarms(steps: list[int | None]) -> None:
    assert not any(causes(StepWatch(60, 600), *steps))


def test_the_first_step_has_the_limit_of_a_start() -> None:
    assert causes(StepWatch(60, 600), *[1] * 41)[-1] == (
        "it hangs: its step 1 has not ended for 600 s (rollout.start_timeout, for the first step)"
    )


def test_a_process_without_answers_hangs() -> None:
    watch = StepWatch(60, 600)
    looks = [watch.record(ENGINE, None, answered=answered) for answered in [True, False, False, True, *[False] * LOOKS]]
    assert not any(looks[:-1]) and looks[-1] == "it hangs: its process has not answered for 60 s (rollout.step_timeout)"


def test_a_new_process_begins_at_zero() -> None:
    watch = StepWatch(60, 600)
    causes(watch, *[7] * LOOKS)
    assert watch.record((0, 1), 7, answered=True) is None


def test_zero_never_looks() -> None:
    assert StepWatch(0, 600).look([ENGINE], lambda engine: Future()) == {}
    watch = StepWatch(0, 600)
    watch.look([ENGINE], lambda engine: Future())
    assert watch.look([ENGINE], lambda engine: pytest.fail("a second look")) == {}


@pytest.mark.parametrize("in_update", [False, True])
def test_an_engine_that_hangs_is_replaced_and_its_groups_go_on(
    monkeypatch: pytest.MonkeyPatch, in_update: bool
) -> None:
    """Its calls fail when its process is ended. An update repeats with new engines, as after a death."""
    now = [0.0]
    monkeypatch.setattr(step_watch.time, "monotonic", lambda: now[0])
    engines = Engines(step_limit=60.0, load_limit=600.0)
    source = source_of(engines)
    source.admit(0)
    hung, other = engines.services
    hung.step, other.step = 7, 3

    def look(seconds: int) -> None:
        for _ in range(0, seconds, 5):
            now[0] += 5.0
            other.step = (other.step or 0) + 1
            engines.fleet.poll()

    look(60)
    assert engines.restarts == []
    if in_update:
        with pytest.raises(ServiceDied), engines.fleet.update():
            look(20)
            raise ServiceDied(Failure.death(ProcessInfo("service engine0"), "the update ends"))
        assert engines.restarts == [0] and engines.fleet.serving == [], "no engine samples until the update is repeated"
        return
    look(20)
    assert engines.restarts == [0] and engines.fleet.serving == [1] and hung.running == {}
    assert "service engine0 on host (pid 7) died: it hangs: its step 7 has not ended for 60 s" in engines.notices[0]
    assert sorted(other.running) == [0, 1, 2, 3, 4, 5, 6, 7]
    engines.load(0)
    look(120)
    assert engines.restarts == [0], "the new process has no step yet"


def test_sglangs_watchdog_limits_its_steps() -> None:
    """An SGLang engine steps in 0.05 s whatever its scheduler does, so that rollout.step_timeout never saw a long step."""
    recipe = Recipe()
    recipe.rollout.engine, recipe.rollout.engine_args = "sglang", {"watchdog_timeout": 60}
    assert step_timeout_notice(recipe.rollout) is None, "engines that hang are not replaced"
    recipe.rollout.min_engines = 1
    notices = environment_notices(recipe, CPUPlatform())
    assert [text for text in notices if "rollout.engine_args.watchdog_timeout (60 s)" in text]
    recipe.rollout.engine = "vllm"
    assert step_timeout_notice(recipe.rollout) is None
