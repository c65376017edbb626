"""The pace of a benchmark's engines and trainers, and the simulation of a paced run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pacing
from benchmarks.asynchrony_prediction import RunLengths, costs, predict
from benchmarks.pacing import Pace, pace_engine, pace_trainer, read, step_seconds
from megarl.recipe.text import to_yaml
from tests.support.estimate_cases import recipe

PACE = Pace(step=0.03, request=0.004, prefill=0.001, train=0.01, weight_sync=0.05, load=0.04)


def test_a_pace_reaches_processes_by_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() is None
    for name, value in PACE.environment().items():
        monkeypatch.setenv(name, value)
    assert read() == PACE


def test_a_step_costs_its_requests_and_the_tokens_beyond_one_of_each() -> None:
    assert step_seconds([], PACE) == 0
    assert step_seconds([1, 1, 1], PACE) == pytest.approx(0.03 + 3 * 0.004)
    assert step_seconds([1, 11], PACE) == pytest.approx(0.03 + 2 * 0.004 + 10 * 0.001)


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


class Scheduler:
    def schedule(self) -> Any:
        return SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 6})


def engine_class(clock: Clock) -> Any:
    class Backend:
        def __init__(self) -> None:
            self.scheduler, self.staged = Scheduler(), None
            self._engine = SimpleNamespace(
                engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
            )

        def step(self) -> str:
            self.scheduler.schedule()
            clock.sleep(0.02)  # its real work
            return "outputs"

        def update_weights(self, version: int, running: int) -> int:
            return version

        def load_weights(self, running: int) -> int:
            return 7

    pace_engine(Backend, PACE)
    return Backend


def test_an_engine_keeps_its_pace_and_its_results(clock: Clock) -> None:
    engine = engine_class(clock)()

    def seconds(call: Any, *arguments: Any) -> tuple[Any, float]:
        begin = clock.now
        return call(*arguments), round(clock.now - begin, 9)

    for _ in range(2):  # the second step must not count the first one's requests
        assert seconds(engine.step) == ("outputs", 0.03 + 2 * 0.004 + 5 * 0.001)
    assert seconds(engine.update_weights, 3, 0) == (3, 0.05)
    assert seconds(engine.load_weights, 0) == (7, 0)  # nothing is staged
    engine.staged = 7
    assert seconds(engine.load_weights, 0) == (7, 0.04)


def test_a_trainer_is_paced_from_the_arrival_of_its_samples(clock: Clock) -> None:
    class Worker:
        def load_shard(self, shard: Any) -> None:
            clock.sleep(0.05)

        def update_actor(self, weight: float | None) -> str:
            return "metrics"

    pace_trainer(Worker, PACE)
    worker = Worker()
    worker.load_shard(SimpleNamespace(samples=[SimpleNamespace(length=6), SimpleNamespace(length=4)]))
    assert worker.update_actor(None) == "metrics"
    assert clock.now == pytest.approx(100.1)
    assert (
        Worker.load_shard.__name__ == "load_shard" and Worker.update_actor.__name__ == "update_actor"
    )  # called by name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run: 6 steps of 2 groups with 2 samples; group g has g + 1 and g + 11 tokens."""
    settings = recipe(
        model__path="model", data__train_files=["rows.parquet"], cluster__placement="disaggregated", cluster__trainers=1,
        rollout__engines=2, rollout__samples_per_prompt=2, rollout__max_staleness=1.0, rollout__window=0.0,
        rollout__engine_args={"max_num_seqs": 8}, data__prompts_per_step=2, train__steps=6,
    )  # fmt: skip
    (tmp_path / "recipe.resolved.yaml").write_text(to_yaml(settings))
    (tmp_path / "samples").mkdir()
    for step in range(1, 7):
        records = [
            {"group": group, "index": index, "prompt_length": 5, "response_length": group + 1 + 10 * index}
            for group in (2 * step - 2, 2 * step - 1)
            for index in (1, 0)  # in any order
        ]
        path = tmp_path / "samples" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_a_simulated_run_has_the_lengths_of_its_groups(run: Path) -> None:
    lengths = RunLengths(run, 2)
    assert lengths.of(0) == [1, 11] and lengths.of(11) == [12, 22] and lengths.prompt == 5
    assert all(1 <= length <= 22 for length in lengths.of(40))


def test_the_prediction_is_of_the_measured_steps(run: Path) -> None:
    """Training is so slow that it sets each step: steps 3 and 4 train groups 4 to 7, with 4 x 5 prompt tokens each."""
    pace = Pace(step=0.001, request=0.0, prefill=0.0, train=1.0, weight_sync=2.0, load=0.0)
    result = predict(run, pace, first=2, last=2)
    tokens = sum(2 * group + 12 for group in (4, 5, 6, 7)) + 2 * 20
    assert result["step"] == pytest.approx((tokens + 4) / 2)
    assert result["tokens per second"] == pytest.approx(tokens / (tokens + 4))
    assert result["waits"] == pytest.approx(0) and result["staleness"] == pytest.approx(1)


def test_a_full_engine_runs_as_many_requests_as_vllm() -> None:
    settings = recipe(rollout__engine_args={"max_num_seqs": 8}, rollout__engines=3)
    paced = costs(settings, PACE, 5.0)
    assert paced.engines == 3 and len(paced.decode) == 9 and paced.decode[8] == pytest.approx(0.03 + 8 * 0.004)
