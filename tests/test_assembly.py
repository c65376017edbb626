"""`build_run` over a stand-in cluster: which processes start, and the order of the calls to them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.assembly import Run, build_run
from megarl.errors import RecipeError
from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.run_directory import RunPlace
from megarl.preflight.run_setup import RunSetup
from megarl.recipe.schema import Recipe
from megarl.rollout.start_engines import check_in_flight
from megarl.rollout.tape import ReplayPlan, TapeSegment
from megarl.trainer.group import ActorGroup, CriticGroup
from megarl.weight_sync.placement import Colocated, Disaggregated, Placement


class Service:
    """An engine's process that records its calls and answers at once."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.address, self.host, self.calls = name, "10.0.0.1", "engines-host", calls

    def call(self, method: str, *args: Any) -> Future[Any]:
        self.calls.append(f"{self.name}.{method}")
        done: Future[Any] = Future()
        answers = {
            "start": {
                "receivers": [(f"{self.name}/0", "host")],
                "can_sleep": True,
                "can_update_in_flight": True,
                "merged_because": None,
            }
        }
        done.set_result(answers.get(method))
        return done


class Workers:
    """Two trainer processes that record their calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.size, self.kept = name, calls, 2, False

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(f"{self.name}.{method}")
        if method == "sees":
            return [("host", Path(args[0]).exists())] * 2
        if method == "describe":
            rank = {
                "dp_size": 2,
                "reports": True,
                "device_name": "cpu",
                "kernels": "plain",
                "machine": f"{self.name}-host",
            }
            return [{**rank, "dp_rank": number} for number in range(2)]
        if method == "open_weight_sync":
            return [SimpleNamespace(timeout=1.0), None]
        return [None] * 2


class Cluster:
    """Starts stand-ins."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.not_taken: list[str] = []
        self.started: list[tuple[str, Any]] = []

    def start_trainers(self, class_path: str, size: int, args: Any, name: str = "trainer", **more: Any) -> Workers:
        self.started.append((class_path.partition(":")[2], (size, *args[1:])))
        return Workers(name, self.calls)

    def start_service(self, class_path: str, args: Any, *, name: str, devices: int, env: Any, **more: Any) -> Service:
        self.started.append((class_path.partition(":")[2], name))
        return Service(name, self.calls)

    def check(self) -> None: ...

    def on_check(self, callback: Any) -> None: ...


def build(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, **prepared: Any) -> tuple[Run, Cluster]:
    monkeypatch.setattr("megarl.rollout.start_engines.process_env", lambda *_: {})
    monkeypatch.setattr("megarl.assembly.EnginesSource", lambda *_: "engines source")
    monkeypatch.setattr("megarl.assembly.answer_requests", lambda *_: None)
    monkeypatch.setattr("megarl.assembly.DatasetSource", lambda *_: "data source")
    recipe.model.path, recipe.observe.console = str(folder / "model"), "plain"
    recipe.observe.tensorboard = recipe.observe.report = False
    nothing: dict[str, Any] = {"prompts": None, "examples": None, "evaluation": None, "held_out": None}
    data = SimpleNamespace(
        **{**nothing, "data_sources": ["rows"], "flops": None, "critic_flops": None, **prepared},
        tokenizer=SimpleNamespace(stop_ids=[0]),
    )
    cluster = Cluster()
    directory = RunDirectory(folder / "run")
    place = RunPlace(directory, checkpoint=None, first_step=1, identity={"seed": 1}, notices=[])
    setup: Any = RunSetup(recipe, data, CPUPlatform(), place, None)  # type: ignore[arg-type]
    with RunLog(recipe, directory, 1, recipe.train.steps) as log:
        return build_run(setup, cluster, log), cluster  # type: ignore[arg-type]


def test_sft_starts_only_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe()
    recipe.train.source, recipe.train.steps, recipe.actor.mini_batches = "sft", 3, 2
    recipe.algorithm.advantage, recipe.algorithm.loss, recipe.cluster.trainers = "none", "sft", 2
    abandoned = tmp_path / "run" / "journal" / "step_000004"
    abandoned.mkdir(parents=True)
    run, cluster = build(recipe, tmp_path, monkeypatch, examples=["row"])
    assert not abandoned.exists(), "a restart after an early failure would go on with it"
    assert cluster.started == [("ActorWorker", (2, 6))]
    assert cluster.calls == ["trainer.sees", "trainer.describe"]
    assert type(run.devices) is Placement and run.source == "data source" and run.evaluate is None
    assert run.device_count == 2 and not list((tmp_path / "run").glob(".shared-*"))
    run.checkpoints.load_weights(tmp_path)
    assert cluster.calls[2:] == ["trainer.load"]


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_rl_with_a_critic(placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe()
    recipe.train.steps, recipe.rollout.engines, recipe.cluster.placement = 5, 2, placement
    recipe.algorithm.advantage, recipe.critic.warmup_steps = "gae", 2
    recipe.weight_sync.route, recipe.cluster.trainers = "full", 2
    run, cluster = build(recipe, tmp_path, monkeypatch, prompts=["row"], evaluation=["problem"])
    trainers = recipe.cluster.trainers
    mini_batches = recipe.actor.mini_batches, recipe.critic.mini_batches
    assert cluster.started == [
        ("RolloutServer", "engine0"), ("RolloutServer", "engine1"), ("ActorWorker", (trainers, 3 * mini_batches[0])),
        ("CriticWorker", (recipe.critic.trainers, 5 * mini_batches[1])),
    ]  # fmt: skip
    assert cluster.calls == [
        "engine0.start", "engine1.start", "trainer.sees", "critic.sees", "critic.describe", "trainer.open_weight_sync",
        "engine0.connect_weight_sync", "engine1.connect_weight_sync", "trainer.describe",
    ]  # fmt: skip
    assert isinstance(run.devices, Colocated if placement == "colocated" else Disaggregated)
    assert isinstance(run.actor, ActorGroup) and isinstance(run.critic, CriticGroup)
    shared = 2  # processes of the actor
    engines = 2 * recipe.rollout.tensor_parallel + recipe.critic.trainers
    assert run.device_count == (shared if placement == "colocated" else shared + engines)
    assert run.checkpoints.saver.groups == {"critic": run.critic, "trainer": run.actor}
    assert run.log.provenance == {
        "hosts": {"trainer-host": {"trainers": 2}, "critic-host": {"critic": 2}, "engines-host": {"engines": 2}},
        "devices": {"kind": "cpu", "trainers": {"cpu": 4}},
    }
    assert run.evaluate is not None
    del cluster.calls[:]
    run.checkpoints.load_weights(tmp_path)
    sleep = ["engine0.sleep", "engine1.sleep"] if placement == "colocated" else []
    assert cluster.calls == [*sleep, "critic.load", "trainer.load"]


@pytest.mark.parametrize(("rule", "refused"), [("refresh", True), ("keep", True), ("drain", False)])
def test_engines_that_take_no_weights_while_requests_run_are_refused(rule: str, refused: bool) -> None:
    recipe = Recipe()
    recipe.cluster.placement, recipe.rollout.max_staleness, recipe.rollout.at_update = "disaggregated", 1, rule  # type: ignore[assignment]
    able, unable = ({"engine": "vllm", "version": "0.16", "can_update_in_flight": each} for each in (True, False))
    check_in_flight(recipe, [able])
    if refused:
        with pytest.raises(RecipeError, match=r"vllm 0.16 cannot take new weights while requests run"):
            check_in_flight(recipe, [able, unable])
    else:
        check_in_flight(recipe, [able, unable])


def test_engines_that_end_requests_asleep_are_refused_with_a_remedy_that_is_accepted() -> None:
    """Colocated engines refuse drain with requests of the next batches."""
    recipe = Recipe()
    recipe.cluster.placement, recipe.rollout.max_staleness = "colocated", 1
    engine = {"engine": "vllm", "version": "0.18.0", "can_update_in_flight": True, "ends_requests_asleep": True}
    with pytest.raises(RecipeError, match=r"vllm 0.18.0 ends running requests when it sleeps") as raised:
        check_in_flight(recipe, [engine])
    assert raised.value.remedy == "set rollout.max_staleness=0, or install vLLM 0.23 or later"
    with pytest.raises(RecipeError, match=r"(?s)cannot take new weights.*max_staleness=0, or install"):
        check_in_flight(recipe, [engine | {"can_update_in_flight": False, "ends_requests_asleep": False}])
    recipe.rollout.max_staleness = 0
    check_in_flight(recipe, [engine])


@pytest.mark.parametrize(
    ("last_step", "logs_last", "exports"), [(None, True, True), (5, True, True), (4, True, False), (5, False, False)]
)
def test_a_replay_that_ends_earlier_exports_nothing(
    last_step: int | None, logs_last: bool, exports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe()
    recipe.train.source, recipe.train.steps, recipe.train.export_at_end = "sft", 5, True
    recipe.algorithm.advantage, recipe.algorithm.loss = "none", "sft"
    run, _ = build(recipe, tmp_path, monkeypatch, examples=["row"])
    assert run.exports_at_end
    run.replay = ReplayPlan(TapeSegment(0, 0, None, False, {}, ()), last_step, logs_last)
    assert run.exports_at_end is exports
    recipe.train.export_at_end = False
    assert not run.exports_at_end
