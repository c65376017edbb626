"""Stages of engine, weight sync and RL step: verdicts over given measurements."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open

from megarl.cluster.failures import CallFailed
from megarl.commands.accept import cut
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import engine, rl_step, weight_sync
from megarl.commands.data.tiny_model import make_tiny_model
from megarl.commands.data.tiny_weights import shapes
from megarl.commands.plan.count.types import DeviceUses, Use
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig
from megarl.weight_sync.connect import RouteRefused


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return StageContext(Settings("cpu", 2), tmp_path, tmp_path, 1e9)


def failed(context: StageContext) -> list[str]:
    return [check.line() for check in context.checks if check.verdict == "FAIL"]


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
    def of(self, context: StageContext, stub: StubEngine) -> list[str]:
        engine._memory(context, "dense", stub, 30.0, {"can_sleep": True})
        return failed(context)

    def test_sleep_that_frees_all_memory_passes(self, context):
        assert self.of(context, StubEngine(0.0)) == []

    def test_leak_is_measured(self, context):
        (line,) = self.of(context, StubEngine(0.03))
        assert "host memory kept by a cycle of sleep: 30.72 MiB a cycle (<= 10 MiB a cycle)" in line

    def test_memory_that_sleep_does_not_free_fails(self, context):
        (line,) = self.of(context, StubEngine(0.0, freed=4.0))
        assert "memory freed by sleep: 0.4 of what the engine took (>= 0.9" in line

    def test_slope_is_not_moved_by_one_jump(self):
        assert engine.slope(np.array([0.0, 1, 2, 100, 4, 5])) == pytest.approx(1.0, abs=0.5)
        assert engine.slope(np.zeros(4)) == 0

    def test_request_that_ignores_its_abort_fails(self, context, monkeypatch):
        monkeypatch.setattr(engine, "ABORT_SECONDS", 0.2)
        stub = SimpleNamespace(
            call=lambda method, *args: Future() if method == "generate" and len(args[0]) == 4 else done([1, 2])
        )
        engine._abort(context, "dense", stub)
        assert any("the request is still running" in line for line in failed(context))

    def test_request_that_ends_before_its_abort_is_not_run(self, context):
        engine._abort(context, "dense", SimpleNamespace(call=lambda *_: done([1, 2])))
        assert [check.verdict for check in context.checks][:1] == ["NOT RUN"]


class TestEngineOfTheRecipe:
    def test_missing_model_is_named(self, context, tmp_path):
        context.settings = replace(context.settings, device="cuda")
        recipe = Recipe()
        recipe.model.path = str(tmp_path / "absent")
        context.__dict__["recipe"] = recipe
        engine._of_recipe(context)
        (check,) = context.checks
        assert check.verdict == "NOT RUN" and "absent has no config.json" in check.cause


class TestWeightSync:
    """The weight-sync stage with stand-ins for joining and for an update."""

    def of(self, monkeypatch: pytest.MonkeyPatch, context: StageContext, joins: Exception | None, sends: Any) -> None:
        def joining(*_: Any) -> str:
            if joins:
                raise joins
            return "session"

        def sending(*_: Any) -> dict[str, float]:
            if isinstance(sends, Exception):
                raise sends
            return {"weight_sync/bytes": 1.0}

        monkeypatch.setattr(weight_sync, "open_weight_sync", joining)
        monkeypatch.setattr(weight_sync, "publish", sending)
        monkeypatch.setattr(weight_sync, "ways", lambda _: [("sharded", "auto")])
        monkeypatch.setattr(weight_sync, "gap", lambda *_: 0.0)
        trainers = SimpleNamespace(call=lambda *_: None)
        actor, service = SimpleNamespace(recipe=Recipe()), SimpleNamespace(call=lambda *_: done([]))
        weight_sync._ways(weight_sync._Pair(context, "dense", trainers, service, actor, {}))  # type: ignore[arg-type]

    def test_refused_route_is_not_run(self, monkeypatch, context):
        self.of(monkeypatch, context, RouteRefused("weight_sync.route=sharded: too old"), {})
        assert [check.verdict for check in context.checks] == ["NOT RUN"]

    def test_engine_that_cannot_join_fails_the_stage(self, monkeypatch, context):
        with pytest.raises(RuntimeError, match="no route to host"):
            self.of(monkeypatch, context, RuntimeError("no route to host"), {})

    def test_differing_update_is_a_failed_check(self, monkeypatch, context):
        with pytest.raises(RuntimeError, match="other bytes"):
            self.of(monkeypatch, context, None, RuntimeError("got other bytes than trainer 0 sent"))
        assert "both sides agree on an update" in failed(context)[0] and "other bytes" in failed(context)[0]

    def test_memory_that_a_trainer_cannot_share_is_not_run(self, monkeypatch, context):
        """An old driver creates no handle. The other transports are tested."""

        class Reader:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def stop(self) -> None: ...

        unshared: Future[Any] = Future()
        unshared.set_exception(CallFailed("trainer 0: _share_npu_: error code is 507899"))
        monkeypatch.setattr(weight_sync, "LocalService", Reader)
        trainers = SimpleNamespace(services=[SimpleNamespace(call=lambda *_: unshared)])
        assert not weight_sync._maps_memory(context, "dense: sharded by ipc", trainers)  # type: ignore[arg-type]
        (check,) = context.checks
        assert (check.verdict, check.name) == ("NOT RUN", "dense: sharded by ipc") and "_share_npu_" in check.cause

    def test_dead_trainer_is_named_by_its_rank(self):
        assert weight_sync.names_trainer("trainer 1 is silent for 30 s", 1)
        assert not weight_sync.names_trainer("trainer 0 is silent for 10.1 s, 1 of 2", 1)
        assert not weight_sync.names_trainer("trainer 10 is silent", 1)


class TestStep:
    line: ClassVar[dict[str, Any]] = {
        "step": 1,
        "actor/grad_norm": 0.5,
        "rollout/logprob_gap_mean": 0.001,
        "actor/skipped_updates": 0.0,
    }

    def of(self, context: StageContext, *changes: dict[str, Any]) -> list[str]:
        rl_step.check_metrics(
            context, "x", [{**self.line, **{"step": n}, **values} for n, values in enumerate(changes, 1)], 2
        )
        return failed(context)

    def test_good_metrics(self, context):
        assert self.of(context, {}, {}) == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"actor/pg_loss": float("nan")}, "step 2: actor/pg_loss is nan"),
            ({"actor/skipped_updates": 1.0}, "a gradient was not finite"),
            ({"rollout/logprob_gap_mean": 0.3}, "engines have other weights"),
        ],
    )
    def test_bad_metrics(self, context, change, words):
        assert any(words in line for line in self.of(context, {}, change))

    def test_missing_comparison_with_the_engine_fails(self, context):
        lines = [{key: value for key, value in self.line.items() if "gap" not in key} | {"step": n} for n in (1, 2)]
        rl_step.check_metrics(context, "x", lines, 2)
        assert "no rollout/logprob_gap_mean of fresh samples" in failed(context)[0]
        context.checks.clear()
        rl_step.check_metrics(context, "x", lines, 2, compares=False)
        assert not failed(context) and any(check.verdict == "NOT RUN" for check in context.checks)

    def test_importance_ratio_of_the_first_update(self, context):
        """The difference is the trainer's log-prob minus the engine's: here 0.1 for each token."""
        line = {**self.line, "actor/ratio": 1.05, "rollout/logprob_gap_k1": -0.1}
        line["rollout/logprob_gap_k3"] = math.exp(0.1) - 1.1
        assert rl_step.behaviour_ratio(line) == pytest.approx(math.exp(0.1))
        rl_step.check_metrics(context, "x", [line], 1, first=True)
        update, engine_ratio = failed(context)
        assert update.startswith("x: importance ratio of the first update, less 1: 0.05 (<= 0.02)")
        assert engine_ratio.startswith(
            "x: ratio of trainer to engine before the first update, less 1: 0.1052 (<= 0.02)"
        )
        context.checks.clear()
        rl_step.check_metrics(context, "x", [self.line], 1, first=True)
        assert len(failed(context)) == 2, "a missing ratio does not count as 1"

    def test_peak_of_a_trainer_is_compared_with_its_tensors(self, context, monkeypatch):
        gib = 2**30
        update = Use("update_actor", {"weights": 2 * gib, "activations": gib, "KV cache": 9 * gib, "contexts": gib})
        places = [DeviceUses("actor 0 + engine", 1, [Use("gen", {"engine weights": 20 * gib}), update])]
        assert rl_step.planned_peak(places) == ("update_actor of actor 0 + engine", 3.0)
        monkeypatch.setattr("megarl.commands.plan.build.make_plan", lambda *_, **__: SimpleNamespace(places=places))
        cut = SimpleNamespace(recipe=None, config={})
        for peak, wrong in ((3.2, 0), (3.4, 1)):
            rl_step._against_the_plan(context, cut, [{"perf/max_memory_allocated_gb": peak}])  # type: ignore[arg-type]
            assert len(failed(context)) == wrong
        assert "3.4 GiB were allocated, and the plan has 3 in update_actor" in failed(context)[0]

    def test_missing_steps_and_zero_gradients_fail(self, context):
        assert "steps: [1] (== [1, 2])" in self.of(context, {"actor/grad_norm": 0.0})[0]
        assert any("nothing is learnt" in line for line in failed(context))


def completion(tokens: list[int], log_probs: list[float]) -> Any:
    return SimpleNamespace(tokens=np.array(tokens), log_probs=np.array(log_probs))


class TestGraphs:
    def test_agreement_ends_at_the_first_differing_token(self):
        first = [completion([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]), completion([5, 6], [0.0, 0.0])]
        second = [completion([1, 2, 9, 4], [0.1, 0.4, 9.0, 9.0]), completion([5, 6], [0.0, 0.1])]
        share, difference = engine.agreement(first, second)
        assert share == pytest.approx(4 / 6) and difference == pytest.approx(0.3 / 4)

    def test_stale_inputs_of_a_graph_are_detected(self, context):
        good, stale = completion([1, 2, 3, 4], [0.1] * 4), completion([7, 7, 7, 7], [0.1] * 4)
        engine.check_replay(context, "graphs", [good], [good])
        assert not failed(context)
        engine.check_replay(context, "graphs", [stale], [good])
        assert len(failed(context)) == 2 and "graphs, tokens: 0 " in failed(context)[0]


class TestFewLayers:
    """Overrides of config.json in stage 4, and the copy of a recipe in stage 6."""

    MOE: ClassVar[dict[str, Any]] = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256,
        "n_group": 8, "num_experts_per_tok": 8, "quantization_config": {"bits": 8},
    }  # fmt: skip

    def test_overrides_of_the_recipe_are_kept(self):
        recipe = Recipe()
        recipe.rollout.engine_args = {"hf_overrides": {"rope_theta": 5.0, "num_hidden_layers": 9}}
        assert engine.few_layers(recipe.rollout, {}, 1) == {"rope_theta": 5.0, "num_hidden_layers": engine.LAYERS}
        kinds = {"layer_types": ["full_attention", "sliding_attention"] * 9}
        assert len(engine.few_layers(recipe.rollout, kinds, 1)["layer_types"]) == engine.LAYERS
        nested = engine.few_layers(recipe.rollout, {"text_config": {"num_hidden_layers": 9}}, 1)
        assert nested["text_config"] == {"num_hidden_layers": engine.LAYERS} and nested["rope_theta"] == 5.0

    def test_a_rank_keeps_its_number_of_experts(self):
        recipe = Recipe()
        recipe.rollout.data_parallel = 128
        assert engine.few_layers(recipe.rollout, self.MOE, 16)["n_routed_experts"] == 32
        assert "n_routed_experts" not in engine.few_layers(recipe.rollout, self.MOE, 128)
        assert cut.fewer_experts(self.MOE, 4, 128) == {"n_routed_experts": 16}, "two of each group, and the chosen ones"
        assert cut.fewer_experts({"num_hidden_layers": 2}, 4, 128) == {}

    @pytest.mark.parametrize(
        ("sizes", "trainers", "devices", "expected"),
        [
            ({"tensor_parallel": 4, "pipeline_parallel": 2}, 8, 8, (4, 2, 1, 1, None, 8)),
            ({"tensor_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 4}, 16, 8,
             (4, 2, 1, 1, 4, 8)),
            ({"pipeline_parallel": 8, "expert_parallel": 32, "first_stage_layers": 6}, 256, 16, (1, 2, 1, 8, None, 16)),
            ({"tensor_parallel": 8, "context_parallel": 4}, 64, 8, (8, 1, 1, 1, None, 8)),
            ({"tensor_parallel": 2, "context_parallel": 4}, 64, 8, (2, 1, 2, 1, None, 8)),
            ({"tensor_parallel": 8, "pipeline_parallel": 4}, 64, 1, (1, 1, 1, 1, None, 1)),
        ],
    )  # fmt: skip
    def test_layout(self, sizes, trainers, devices, expected):
        small, count = cut.fit_layout(MegatronConfig(**sizes), trainers, devices)
        parallel = (small.tensor_parallel, small.pipeline_parallel, small.context_parallel)
        assert (*parallel, small.expert_parallel, small.expert_tensor_parallel, count) == expected
        assert cut.layers_of(small) == 4 if small.first_stage_layers else 2 * small.pipeline_parallel

    def test_config(self):
        large, small = MegatronConfig(expert_parallel=32), MegatronConfig(expert_parallel=8, pipeline_parallel=2)
        config = cut.cut_config(self.MOE, large, small)
        assert (config["num_hidden_layers"], config["first_k_dense_replace"], config["n_routed_experts"]) == (4, 1, 64)
        assert "quantization_config" not in config and self.MOE["num_hidden_layers"] == 61

    def test_devices_of_trainers_and_engines(self):
        recipe = Recipe()
        recipe.cluster.trainers, recipe.rollout.engines, recipe.cluster.placement = 8, 8, "colocated"
        assert cut.split(recipe, 8) == (8, 8, 8)
        recipe.cluster.placement = "disaggregated"
        assert cut.split(recipe, 16) == (8, 0, 8)
        assert cut.split(recipe, 8) == (4, 0, 4) and cut.split(recipe, 3) == (2, 0, 1)
        with pytest.raises(cut.CannotCut, match="trainers and engines need separate devices, and this node has 1"):
            cut.split(recipe, 1)

    def test_devices_of_a_critic(self):
        """A disaggregated critic has separate devices; their sum is the number of devices."""
        recipe = Recipe()
        recipe.algorithm.advantage, recipe.cluster.placement = "gae", "disaggregated"
        recipe.cluster.trainers = recipe.critic.trainers = recipe.rollout.engines = 4
        assert cut.split(recipe, 12) == (4, 4, 4)
        assert cut.split(recipe, 8) == (2, 2, 4) and cut.split(recipe, 3) == (1, 1, 1)
        with pytest.raises(cut.CannotCut, match="trainers, critic and engines need separate devices"):
            cut.split(recipe, 2)
        recipe.cluster.placement = "colocated"
        assert cut.split(recipe, 4) == (4, 4, 4)

    def test_copy_that_does_not_fit_the_disk(self, tmp_path, monkeypatch):
        """The message has the bytes that are compared: twice the weights."""
        source = make_tiny_model("qwen3_moe", tmp_path / "source", 0)
        config = json.loads((source / "config.json").read_text())
        monkeypatch.setattr(cut, "shapes", lambda _: [("x", (2**30,))])
        monkeypatch.setattr(cut.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
        with pytest.raises(cut.CannotCut, match=r"twice its weights need 4 GiB, and .* has 3 GiB free"):
            cut._write_model(tmp_path / "model", config, source, tmp_path)

    def test_copy_of_a_recipe(self, tmp_path):
        """The copy has real widths, a layout for two devices, and dummy weights with transformers' names and shapes."""
        source = make_tiny_model("qwen3_moe", tmp_path / "source", 0, num_hidden_layers=6)
        (tmp_path / "rows").mkdir()
        recipe = tmp_path / "r.yaml"
        recipe.write_text(
            f"model: {{path: {source}, dtype: bfloat16}}\ncluster: {{trainers: 16, device: npu, placement: colocated}}\n"
            "data: {train_files: [data/gsm8k/train.parquet], prompts_per_step: 64}\n"
            "rollout: {engines: 8, tensor_parallel: 2, max_response_length: 4096, engine_args: {enforce_eager: true},\n"
            "  quantization: fp8}\n"
            "megatron: {tensor_parallel: 2, pipeline_parallel: 4, expert_parallel: 2}\nreward: {function: gsm8k}\n"
            "actor: {max_tokens_per_micro_batch: 16384, mini_batches: 4}\n"
        )
        folder = tmp_path / "cut"
        folder.mkdir()
        tiny = cut.make_cut(recipe, [], folder, "cpu", 4)
        assert tiny.layout.startswith("TP2 PP2 EP2 on 4 trainers (the recipe: 16), 2 engines of TP2, 4 layers")
        assert tiny.recipe.rollout.engine_args == {"enforce_eager": True} and tiny.recipe.cluster.device == "cpu"
        assert tiny.recipe.rollout.quantization == "fp8", "engines of the recipe's precision are tested"
        assert tiny.recipe.actor.max_tokens_per_micro_batch == 4 * (cut.PROMPT + cut.RESPONSE)
        assert tiny.config["hidden_size"] == 64 and tiny.config["num_experts"] == 4
        index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(index) == {name for name, _ in shapes(tiny.config)} and len(set(index.values())) == 5
        with safe_open(folder / "model" / index["model.layers.3.mlp.experts.1.up_proj.weight"], "pt") as file:
            tensor = file.get_tensor("model.layers.3.mlp.experts.1.up_proj.weight")
            norm = file.get_tensor("model.layers.3.input_layernorm.weight")
        assert (
            tensor.dtype == torch.bfloat16 and tensor.shape == (64, 64) and 0.015 < float(tensor.float().std()) < 0.025
        )
        assert bool((norm == 1).all())

    def test_recipe_without_model_files_cannot_be_cut(self, tmp_path):
        recipe = tmp_path / "r.yaml"
        recipe.write_text("model: {path: absent}\ndata: {train_files: [data/gsm8k/train.parquet]}\n")
        with pytest.raises(cut.CannotCut, match=r"absent has no config\.json"):
            cut.make_cut(recipe, [], tmp_path, "cpu", 4)
