"""The judge's verdicts on the tape: a replay gives every sample the same reward, and asks no judge."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.tape import ReplayError, TapeSpec
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.evaluate import FIRST_EVALUATION_GROUP
from megarl.rollout.judge.server import Judgement
from megarl.rollout.judge.service import with_judge
from megarl.rollout.judge.tape import Verdicts
from megarl.rollout.tape import ReplayPlan, RunTape, TapeSegment
from megarl.types import GenerationRequest, InlineData, SampleFailure, Sampling
from tests.rollout.test_judge import ROW, Later, group, recipe, vectors
from tests.support.fixed_engines import Fixed

FAILURE = SampleFailure("judge", ROW.uid, "error", "no number", 3)


def score(service: Any, engine: Later, number: int) -> Future[Any]:
    """Sample a group of two on `engine`, and return its future result."""
    service.submit([GenerationRequest(number, ROW, Sampling(2, 8), 0)])
    result: Future[Any] = service.collect(number)
    engine.calls[-1][2].set_result((group(number, 1.0, 0.0), vectors("a", "b")))
    return result


def recorded(path: Path, *judged: tuple[int, list[Judgement]]) -> list[Any]:
    """Judge groups in a run that writes its verdicts to `path`; returns the groups."""
    engine, fixed = Later("engine0"), Fixed(1)
    engines: Any = [EngineHandle(engine)]  # type: ignore[arg-type]
    verdicts = Verdicts.of(TapeSpec(str(path), 0))
    (service,) = with_judge(recipe().judge, recipe().reward, engines, fixed.engines, verdicts)
    groups = []
    for number, judgements in judged:
        result = score(service, engine, number)
        fixed.processes[0].calls[-1][2].set_result((judgements, InlineData(["x", "y"])))
        groups.append(result.result(0)[0])
    return groups


def replaying(path: Path, recorded: Path) -> tuple[Any, Later]:
    engine = Later("engine0")
    verdicts = Verdicts.of(TapeSpec(str(path), 0, str(recorded), 0))
    engines: Any = [EngineHandle(engine)]  # type: ignore[arg-type]
    (service,) = with_judge(recipe().judge, recipe().reward, engines, None, verdicts)
    return service, engine


def test_a_replay_adds_the_recorded_scores_failures_and_retries(tmp_path: Path) -> None:
    path = tmp_path / "judge.jsonl"
    scores = [(4, [Judgement(1 / 3, 1), Judgement(FAILURE, 2)]), (3, [Judgement(0.1), Judgement(0.7)])]
    groups = recorded(path, *scores)
    service, engine = replaying(tmp_path / "again.jsonl", path)
    for before in sorted(groups, key=lambda each: each.number):  # in another order
        after, data = score(service, engine, before.number).result(0)
        assert [sample.reward for sample in after.samples] == pytest.approx(
            [sample.reward for sample in before.samples], rel=0, nan_ok=True
        )
        assert [sample.reward_parts for sample in after.samples] == [sample.reward_parts for sample in before.samples]
        assert (after.failures, after.scoring_retries) == (before.failures, before.scoring_retries)
        assert "the recorded verdict" in data.get()[0].reason
    assert math.isnan(groups[0].samples[1].reward) and groups[0].failures == (FAILURE,)
    assert sorted(path.read_text().splitlines()) == sorted((tmp_path / "again.jsonl").read_text().splitlines())


def test_each_evaluation_has_its_verdicts(tmp_path: Path) -> None:
    """Problems have the same numbers in every evaluation."""
    path, number = tmp_path / "judge.jsonl", FIRST_EVALUATION_GROUP + 1
    recorded(path, *((number, [Judgement(value), Judgement(0.0)]) for value in (0.25, 0.75)))
    service, engine = replaying(tmp_path / "again.jsonl", path)
    rewards = [score(service, engine, number).result(0)[0].samples[0].reward for _ in range(2)]
    assert rewards == [1.125, 1.375]


def test_a_group_without_a_verdict_waits(tmp_path: Path) -> None:
    """The recorded run was killed before its verdicts came."""
    recorded(path := tmp_path / "judge.jsonl")
    service, engine = replaying(tmp_path / "again.jsonl", path)
    assert not score(service, engine, 3).done()


def test_a_collected_group_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    """Another scorer failed on it in the recorded run, and succeeds in the replay."""
    recorded(tmp_path / "judge.jsonl")
    plan = ReplayPlan(TapeSegment(0, 0, None, False, {}, [{"group": 3, "tokens": 5, "checksum": "a"}]), 1)
    verdicts = RunTape(tmp_path / "again", {"segment": 0}, tmp_path, plan).verdicts
    (tmp_path / "again").mkdir()
    engine = Later("engine0")
    engines: Any = [EngineHandle(engine)]  # type: ignore[arg-type]
    (service,) = with_judge(recipe().judge, recipe().reward, engines, None, verdicts())
    result = score(service, engine, 3)
    assert result.done()
    with pytest.raises(ReplayError, match="group 3 has no recorded verdict of the judge"):
        result.result(0)
    assert not score(service, engine, 4).done(), "the recorded run did not collect group 4"


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    recorded(path := tmp_path / "judge.jsonl")
    with pytest.raises(ReplayError, match=r"judge\.jsonl has no segment 5"):
        Verdicts.of(TapeSpec(str(tmp_path / "new.jsonl"), 0, str(path), 5))
