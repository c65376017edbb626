"""pass@k, maj@k against numbers worked by hand."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest

from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.evaluate import accuracy_metrics, evaluate, majority_is_correct, pass_at_k
from megarl.rollout.requests import Requests
from megarl.types import GenerationRequest, Group, InlineData, Prompt, Sample, SampleFailure
from tests.support.collecting import CollectedService


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(1, 4, 1) == pytest.approx(1 / 4)
    assert pass_at_k(1, 4, 2) == pytest.approx(1 / 2)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(3, 4, 2) == 1.0
    assert pass_at_k(0, 4, 4) == 0.0


def test_majority() -> None:
    assert majority_is_correct(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority_is_correct(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority_is_correct(["7", "8"], [True, False]) == 0.5  # a tie shares the vote
    assert majority_is_correct([None, None, "7"], [False, False, True]) == 1.0  # no answer, no vote
    assert majority_is_correct([None], [False]) == 0.0


def test_metrics_over_problems() -> None:
    def group(answers: str) -> Group:
        samples = [
            Sample(
                0,
                i,
                InlineData([]),
                1,
                2,
                2,
                reward=0.9 * (a == "7"),
                reward_parts={"accuracy": float(a == "7")},
                answer=a,
            )
            for i, a in enumerate(answers)
        ]
        return Group(0, "row", "source", samples)

    metrics = accuracy_metrics([group("778"), group("888")], [1, 3])
    assert metrics["eval/pass@1"] == pytest.approx((2 / 3) / 2)
    assert metrics["eval/pass@3"] == pytest.approx(0.5)
    assert metrics["eval/maj@3"] == pytest.approx(0.5)
    assert metrics["eval/rewards/mean"] == pytest.approx(0.9 * 2 / 6)


class Engine(CollectedService):
    """Answer the engine's problem i after i + 1 pauses of half a second; a silent engine never answers."""

    def __init__(self, name: str, *, silent: bool, pause: float = 0.5, unscored: int = 0) -> None:
        self.name, self.silent, self.pause, self.unscored, self.collected = name, silent, pause, unscored, 0
        self.requests: list[GenerationRequest] = []
        super().__init__()

    def call(self, method: str, requests: Any) -> Future[Any]:
        assert method == "submit"
        self.requests += requests
        for request in requests:
            self.promise(request.group, self.answer_to(request.group))
        return self._later(None, after=3)  # the time of all requests

    def answer_to(self, number: int) -> Future[Any]:
        self.collected += 1
        failed = self.collected <= self.unscored
        sample = Sample(number, 0, InlineData([]), 1, 2, 2, reward=math.nan if failed else 1.0)
        failures = (
            (SampleFailure("scorer 'mine'", f"row/{number}", "crash", "its process was killed"),) if failed else ()
        )
        group = Group(number, "row", "test", [sample], failures=failures)
        return self._later((group, InlineData([])), after=self.collected)

    def _later(self, result: Any, after: int) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.silent:
            threading.Timer(self.pause * after, future.set_result, (result,)).start()
        return future


def evaluation_on(*engines: Engine, **rollout: Any) -> Any:
    recipe = Recipe(rollout=RolloutConfig(**rollout))
    recipe.rollout.timeout = 1.2
    problems = [Prompt(f"row/{i}", (1, 2), "text", "test") for i in range(6)]
    return evaluate(recipe, problems, [EngineHandle(engine) for engine in engines], [0], lambda: None)  # type: ignore[arg-type]


class Prompts(list[Prompt]):
    """A data set of one file without difficulties."""

    sets: ClassVar = {"train": 1}
    difficulty = None


def test_end_of_text_tokens_end_answers_unless_they_are_ignored() -> None:
    for ignored, stops in ((False, (0,)), (True, ())):
        engine = Engine("engine0", silent=False, pause=0.01)
        evaluation_on(engine, ignore_eos=ignored)
        assert {request.sampling.stop_token_ids for request in engine.requests} == {stops}
        prompts: Any = Prompts([Prompt("row/0", (1, 2), "text", "test")])
        recipe = Recipe(rollout=RolloutConfig(ignore_eos=ignored))
        assert Requests(recipe, prompts, [0]).of(0).sampling.stop_token_ids == stops


def test_an_engine_without_progress_ends_the_evaluation() -> None:
    with pytest.raises(
        RuntimeError, match=r"rollout\.timeout\); 3 are running, the oldest is problem 1 .*, on engine1"
    ):
        evaluation_on(Engine("engine0", silent=False), Engine("engine1", silent=True))


def test_an_evaluation_with_progress_does_not_time_out() -> None:
    assert len(evaluation_on(Engine("engine0", silent=False)).groups) == 6


def test_an_unscored_problem_is_not_a_wrong_answer() -> None:
    """Five of six answers are right and the sixth could not be scored: accuracy is 1, not 5/6."""
    result = evaluation_on(Engine("engine0", silent=False, pause=0.01, unscored=1))
    assert result.metrics["eval/pass@1"] == result.metrics["eval/rewards/mean"] == 1.0
    assert result.metrics["eval/scoring_failed"] == 1.0
    assert "1 samples of 1 problems" in result.notices[0] and "its process was killed" in result.notices[0]


def test_a_mostly_unscored_evaluation_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"4 of 6 problems of the evaluation .*'mine' failed on row"):
        evaluation_on(Engine("engine0", silent=False, pause=0.01, unscored=4))
