"""The stages themselves: whole on a CPU, and with faults in their processes."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from megarl.checks.finding import Finding
from megarl.commands.accept import command, runner
from megarl.commands.accept.catalogue import STAGES
from megarl.commands.accept.collective_rank import Timing
from megarl.commands.accept.context import Context
from megarl.commands.accept.result import StageResult
from megarl.commands.accept.settings import Settings, write_settings
from megarl.commands.accept.stages import collectives, engine, environment, exchange, rl_step
from megarl.config.schema import Recipe
from megarl.platform.devices import devices
from megarl.route import RouteRefused
from tests.test_accept import plant

STAGE = {stage.number: stage for stage in STAGES}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(Settings("cpu", 2), tmp_path, tmp_path, 1e9)


def failed(context: Context) -> list[str]:
    return [check.line() for check in context.checks if check.verdict == "FAIL"]


class TestEnvironment:
    def test_findings_of_the_doctor_are_checks(self):
        bad = environment.check_of(Finding("FAIL", "no devices", "pass them in", check="devices"))
        assert (bad.verdict, bad.name) == ("FAIL", "doctor: devices") and "no devices -> pass them in" in bad.line()
        assert environment.check_of(Finding("warning", "old", "new", check="x")).verdict == "REPORT"
        assert environment.check_of(Finding("ok", "fine", check="x", host="b", rank=2)).name == "doctor: x on b"

    def test_a_route_that_cannot_be_taken(self, context):
        capabilities = {"version": "0.11.0", "no_planned": "vLLM 0.11.0 cannot reload its layers"}
        recipe = Recipe()
        context.__dict__["recipe"] = recipe
        environment._route(context, capabilities)
        (route,) = [check for check in context.checks if check.name.endswith("route")]
        assert route.value == "export, because vLLM 0.11.0 cannot reload its layers" and not failed(context)
        recipe.exchange.route = "planned"
        environment._route(context, capabilities)
        assert "exchange.route=planned: vLLM 0.11.0 cannot reload" in failed(context)[0]
        context.checks.clear()
        environment._route(context, capabilities | {"no_planned": None})
        assert not failed(context)

    def test_capabilities_have_the_fields_that_are_read(self):
        from megarl.engines.vllm_compat import Capabilities

        assert {"version", "device", "no_planned"} <= set(Capabilities.__dataclass_fields__)


def timing(rank: int, **changes: Any) -> list[Timing]:
    own = Timing("tensor", "all_reduce", (0, 1, 2, 3), 0.01, 0.0001, 1e9, True)
    return [replace(own, **changes.get(f"r{rank}", {}))]


class StubRanks:
    """Ranks with given timings of collectives and pairs, and given free memory."""

    size = 4

    def __init__(self, timings: list[list[Timing]], memory: tuple[float, float] = (10.0, 9.9), slow: int = 9) -> None:
        self.timings, self.memory, self.slow = timings, list(memory), slow

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "memory":
            return [self.memory.pop(0)] * 4
        if method == "pair":
            first, second = args[:2]
            return [(10.0 if first == self.slow else 1.0) if rank == second else None for rank in range(4)]
        return self.timings


class TestCollectives:
    def of(
        self,
        monkeypatch: pytest.MonkeyPatch,
        context: Context,
        hosts: str = "aaaa",
        memory: tuple[float, float] = (10.0, 9.9),
        **changes: Any,
    ) -> list[str]:
        context.settings = replace(context.settings, device="cuda")
        ranks = StubRanks([timing(rank, **changes) for rank in range(4)], memory)
        collectives._group(context, ranks, "tensor", 1, list(hosts), devices()["H100"], "")
        return failed(context)

    def test_good_ranks(self, monkeypatch, context):
        assert self.of(monkeypatch, context, **{f"r{rank}": {"seconds": 0.003} for rank in range(4)}) == []

    def test_late_rank_is_named(self, monkeypatch, context):
        seconds = {"seconds": 0.003}
        lines = self.of(monkeypatch, context, r0=seconds, r1=seconds, r2=seconds | {"launch": 0.3}, r3=seconds)
        assert len(lines) == 1 and "rank 2 enters 0.3 s after the others" in lines[0]

    def test_early_rank_makes_nobody_late(self, monkeypatch, context):
        late = {"seconds": 0.003, "launch": 0.3}
        assert self.of(monkeypatch, context, r0={"seconds": 0.003}, r1=late, r2=late, r3=late) == []

    def test_wrong_values_are_named(self, monkeypatch, context):
        seconds = {"seconds": 0.003}
        lines = self.of(monkeypatch, context, r0=seconds, r1=seconds, r2=seconds, r3=seconds | {"right": False})
        assert len(lines) == 1 and "wrong values on ranks [3]" in lines[0]

    def test_slow_group_names_its_limit(self, monkeypatch, context):
        (line,) = self.of(monkeypatch, context, r1={"seconds": 1.0})
        assert "rate: 1 GB/s (>= " in line and "60% of" in line and "(link of H100)" in line
        context.checks.clear()
        network = devices()["H100"].network
        (line,) = self.of(monkeypatch, context, hosts="aabb", r1={"seconds": 1.0})
        assert f"{network / 1e9:.3g} GB/s (network of H100)" in line

    def test_communicator_that_keeps_memory(self, monkeypatch, context):
        seconds = {f"r{rank}": {"seconds": 0.003} for rank in range(4)}
        (line,) = self.of(monkeypatch, context, memory=(10.0, 8.0), **seconds)
        assert "memory of the communicator: 2 GiB (<= 1 GiB)" in line

    def test_slow_pairs_are_named(self, context):
        context.settings = replace(context.settings, device="cuda")
        assert collectives.slow_pairs(context, StubRanks([], slow=2), 1000, "aaaa") == "2-3 (4e-07 GB/s)"
        assert "slow pairs: 2-3" in failed(context)[0]
        context.checks.clear()
        assert collectives.slow_pairs(context, StubRanks([]), 1000, "aaaa") == "" and not failed(context)

    def test_pairs_over_the_network_are_compared_with_each_other(self, context):
        """A healthy network of a fifth of the links' rate is no fault; a slow one among its pairs is."""
        context.settings = replace(context.settings, device="cuda")
        hosts = ["a"] * 8 + ["b"] * 8
        pairs = collectives.pairs_of(hosts)
        assert (0, 8) in pairs and (7, 15) in pairs and (0, 1) in pairs and len(pairs) == 14 + 8
        rates = {pair: 1.0 if hosts[pair[0]] == hosts[pair[1]] else 5.0 for pair in pairs}

        def call(_: str, first: int, second: int, __: int) -> list[float | None]:
            return [rates[first, second] if rank == second else None for rank in range(16)]

        ranks = SimpleNamespace(size=16, call=call)
        assert collectives.slow_pairs(context, ranks, 1000, hosts) == "" and not failed(context)
        rates[3, 11] = 15.0
        assert collectives.slow_pairs(context, ranks, 1000, hosts).startswith("3-11 ")
        assert "slowest pair of ranks between hosts, 3-11" in failed(context)[0]

    def test_one_pair_proves_nothing(self, context):
        context.settings = replace(context.settings, device="cuda")
        collectives.slow_pairs(context, StubRanks([]), 1000, "aa")
        assert not any(check.verdict == "PASS" for check in context.checks)

    def test_pairs_of_many_hosts_are_spread_over_all(self):
        hosts = [f"h{rank // 8}" for rank in range(256)]
        pairs = collectives.pairs_of(hosts)
        touched = {hosts[rank] for pair in pairs for rank in pair}
        assert len(pairs) <= 2 * collectives.PAIRS and len(touched) == 32

    def test_layout(self, context):
        assert collectives.layout(context)[0].tensor_parallel == 2
        recipe = Recipe()
        recipe.cluster.trainers, recipe.megatron.pipeline_parallel = 2, 2
        context.__dict__["recipe"] = recipe
        assert collectives.layout(context) == (recipe.megatron, "the recipe's")


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class StubEngine:
    """An engine that keeps `leak` GiB of the host with each sleep, and frees `freed` GiB of the device."""

    def __init__(self, leak: float, freed: float = 10.0) -> None:
        self.leak, self.freed, self.sleeps, self.asleep = leak, freed, 0, False

    def call(self, method: str, *_: Any) -> Future[Any]:
        if method == "sleep":
            self.sleeps += 1
            self.asleep = True
        if method == "wake":
            self.asleep = False
        answers = {
            "resident": 5.0 + self.leak * self.sleeps,
            "free_memory": 20.0 + (self.freed if self.asleep else 0.0),
        }
        return done(answers.get(method))


class TestEngine:
    def of(self, context: Context, stub: StubEngine) -> list[str]:
        engine._memory(context, "dense", stub, 30.0, {"can_sleep": True})
        return failed(context)

    def test_sleep_that_frees_everything(self, context):
        assert self.of(context, StubEngine(0.0)) == []

    def test_leak_is_measured(self, context):
        (line,) = self.of(context, StubEngine(0.03))
        assert "host memory kept by a cycle of sleep: 30.72 MiB a cycle (<= 10 MiB a cycle)" in line

    def test_memory_that_stays(self, context):
        (line,) = self.of(context, StubEngine(0.0, freed=4.0))
        assert "memory freed by sleep: 0.4 of what the engine took (>= 0.9" in line

    def test_slope_is_not_moved_by_one_jump(self):
        assert engine.slope(np.array([0.0, 1, 2, 100, 4, 5])) == pytest.approx(1.0, abs=0.5)
        assert engine.slope(np.zeros(4)) == 0

    def test_request_that_cannot_be_aborted(self, context, monkeypatch):
        monkeypatch.setattr(engine, "ABORT_SECONDS", 0.2)
        stub = SimpleNamespace(
            call=lambda method, *args: Future() if method == "generate" and len(args[0]) == 4 else done([1, 2])
        )
        engine._abort(context, "dense", stub)
        assert any("the request is still running" in line for line in failed(context))


class TestEngineOfTheRecipe:
    def test_missing_model_is_named(self, context, tmp_path):
        context.settings = replace(context.settings, device="cuda")
        recipe = Recipe()
        recipe.model.path = str(tmp_path / "absent")
        context.__dict__["recipe"] = recipe
        engine._of_recipe(context)
        (check,) = context.checks
        assert check.verdict == "NOT RUN" and "absent holds no config.json" in check.cause


class TestExchange:
    """One way of the stage, with what joining and an update do put in its place."""

    def of(self, monkeypatch: pytest.MonkeyPatch, context: Context, joins: Exception | None, sends: Any) -> None:
        def joining(*_: Any) -> str:
            if joins:
                raise joins
            return "session"

        def sending(*_: Any) -> dict[str, float]:
            if isinstance(sends, Exception):
                raise sends
            return {"exchange/bytes": 1.0}

        monkeypatch.setattr(exchange, "open_exchange", joining)
        monkeypatch.setattr(exchange, "publish", sending)
        monkeypatch.setattr(exchange, "ways", lambda _: [("planned", "auto")])
        monkeypatch.setattr(exchange, "gap", lambda *_: 0.0)
        trainers = SimpleNamespace(call=lambda *_: None)
        exchange._ways(context, "dense", Recipe(), trainers, SimpleNamespace(call=lambda *_: done([])), {})  # type: ignore[arg-type]

    def test_way_that_is_refused_is_not_run(self, monkeypatch, context):
        self.of(monkeypatch, context, RouteRefused("exchange.route=planned: too old"), {})
        assert [check.verdict for check in context.checks] == ["NOT RUN"]

    def test_engine_that_cannot_join_fails_the_stage(self, monkeypatch, context):
        with pytest.raises(RuntimeError, match="no route to host"):
            self.of(monkeypatch, context, RuntimeError("no route to host"), {})

    def test_update_that_differs_is_a_failed_check(self, monkeypatch, context):
        with pytest.raises(RuntimeError, match="other bytes"):
            self.of(monkeypatch, context, None, RuntimeError("got other bytes than trainer 0 sent"))
        assert "both sides agree on an update" in failed(context)[0] and "other bytes" in failed(context)[0]

    def test_dead_trainer_is_named_by_its_rank(self):
        assert exchange.names_trainer("trainer 1 is silent for 30 s", 1)
        assert not exchange.names_trainer("trainer 0 is silent for 10.1 s, 1 of 2", 1)
        assert not exchange.names_trainer("trainer 10 is silent", 1)


class TestStep:
    line: ClassVar[dict[str, Any]] = {
        "step": 1,
        "actor/grad_norm": 0.5,
        "rollout/logprob_gap_mean": 0.001,
        "actor/skipped_updates": 0.0,
    }

    def of(self, context: Context, *changes: dict[str, Any]) -> list[str]:
        rl_step.judge_metrics(
            context, "x", [{**self.line, **{"step": n}, **own} for n, own in enumerate(changes, 1)], 2
        )
        return failed(context)

    def test_good_metrics(self, context):
        assert self.of(context, {}, {}) == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"actor/pg_loss": float("nan")}, "step 2: actor/pg_loss is nan"),
            ({"actor/skipped_updates": 1.0}, "a gradient was not finite"),
            ({"rollout/logprob_gap_mean": 0.3}, "engines sample from other weights"),
        ],
    )
    def test_bad_metrics(self, context, change, words):
        assert any(words in line for line in self.of(context, {}, change))

    def test_engine_that_is_never_compared(self, context):
        lines = [{key: value for key, value in self.line.items() if "gap" not in key} | {"step": n} for n in (1, 2)]
        rl_step.judge_metrics(context, "x", lines, 2)
        assert "no rollout/logprob_gap_mean of fresh samples" in failed(context)[0]
        context.checks.clear()
        rl_step.judge_metrics(context, "x", lines, 2, compares=False)
        assert not failed(context) and any(check.verdict == "NOT RUN" for check in context.checks)

    def test_missing_steps_and_nothing_learnt(self, context):
        assert "steps: [1] (== [1, 2])" in self.of(context, {"actor/grad_norm": 0.0})[0]
        assert any("nothing is learnt" in line for line in failed(context))


def run(tmp_path: Path, number: int, seconds: float = 400.0) -> StageResult:
    write_settings(tmp_path, Settings("cpu", 2))
    return runner.run_stage(tmp_path, STAGE[number], seconds)


@pytest.mark.stack
def test_kernels_models_and_collectives_pass_on_a_cpu(tmp_path):
    """CI runs these three stages; test_all_stages runs all of them."""
    assert command.accept(None, [], command.Options(device="cpu", stages="1-3,8", out=tmp_path)) == 0
    (results,) = tmp_path.glob("*/results.json")
    stages = {entry["name"]: entry for entry in json.loads(results.read_text())}
    assert [entry["verdict"] for entry in stages.values()] == ["PASS"] * 3
    assert all(len(entry["checks"]) > 15 for entry in stages.values())
    names = " ".join(check["name"] for check in stages["model parity"]["checks"])
    for layout in ("dense TP2", "dense CP2", "moe EP2", "moe TP2ETP2", "mla PP2", "vl TP2", "mla 1 float32 recompute"):
        assert layout in names, layout


@pytest.mark.stack
def test_late_rank_is_found_among_processes(tmp_path, monkeypatch):
    plant(monkeypatch, "megarl.commands.accept.collective_rank", "faults_of_processes:late_collective")
    result = run(tmp_path, 3)
    assert (
        result.verdict == "FAIL" and "all_reduce, latest rank" in result.reason and "rank 1 enters 0.8" in result.reason
    )


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "module", "fault", "words", "seconds"),
    [
        (3, "collective_rank", "wrong_gather", "gather, values: False (== True): wrong values on ranks [0]", 200),
        (3, "collective_rank", "absent_rank", "not finished after 60 s at: collectives in the group tensor", 60),
        (4, "engine_probe", "leaking_sleep", "host memory kept by a cycle of sleep", 400),
        (4, "engine_probe", "other_temperature", "engine and trainer compute different models", 400),
        (5, "engine_probe", "old_weights", "the engine samples from other weights than the trainers'", 400),
    ],
)
def test_fault_among_processes_is_named(tmp_path, monkeypatch, stage, module, fault, words, seconds):
    plant(monkeypatch, f"megarl.commands.accept.{module}", f"faults_of_processes:{fault}")
    result = run(tmp_path, stage, seconds)
    assert result.verdict == "FAIL" and words in result.reason, result.reason


@pytest.mark.stack
@pytest.mark.slow
def test_corrupted_bucket_is_named(tmp_path, monkeypatch):
    plant(monkeypatch, "megarl.exchange.fingerprint", "faults_of_processes:corrupted_bucket")
    result = run(tmp_path, 5)
    assert result.verdict == "FAIL" and "planned by auto: two updates" in result.reason, result.reason
    assert "got other bytes than trainer" in result.reason, result.reason


@pytest.mark.stack
@pytest.mark.slow
def test_memory_that_cannot_be_mapped_leaves_the_other_ways(tmp_path, monkeypatch):
    plant(monkeypatch, "megarl.platform.cpu", "faults_of_processes:unmappable_memory")
    result = run(tmp_path, 5)
    assert result.verdict == "PASS", result.reason
    (left_out,) = [check for check in result.checks if check.name == "dense: planned by ipc"]
    assert left_out.verdict == "NOT RUN" and "pidfd_getfd" in left_out.cause, left_out
    assert any(check.name.startswith("dense: export by collective") for check in result.checks)


@pytest.mark.stack
@pytest.mark.slow
def test_all_stages(tmp_path):
    """The acceptance of a CPU, whole, with a recipe."""
    recipe = Path(__file__).parent.parent / "recipes" / "grpo_qwen3_8b.yaml"
    assert command.accept(recipe, [], command.Options(device="cpu", out=tmp_path)) == 0
    (results,) = tmp_path.glob("*/results.json")
    assert [entry["verdict"] for entry in json.loads(results.read_text())] == ["PASS"] * len(STAGES)
    (calibration,) = tmp_path.glob("*/7-speed/calibration.yaml")
    from megarl.planner.calibration import read_calibration

    assert read_calibration(calibration).device == "CPU"


def test_every_stage_has_its_module():
    for stage in STAGES:
        assert importlib.util.find_spec(f"megarl.commands.accept.stages.{stage.name.replace(' ', '_')}"), stage.name
    assert [stage.number for stage in STAGES] == list(range(8))


@pytest.mark.stack
@pytest.mark.slow
def test_collectives_over_ray(tmp_path):
    """Two nodes' worth of ranks as Ray places them, here both on this machine."""
    context = Context(Settings("cpu", 1, nodes=2), tmp_path, tmp_path, 1e9)
    collectives.run(context)
    assert not failed(context) and len(context.checks) > 10
