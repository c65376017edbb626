"""The acceptance with its processes: all stages on a CPU, and faults in its processes."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.accept import command, cut, runner
from megarl.commands.accept.catalogue import STAGES
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.result import StageResult
from megarl.commands.accept.settings import Settings, write_settings
from megarl.commands.accept.stages import collectives, rl_step
from megarl.commands.data.tiny_model import make_tiny_model
from megarl.commands.plan.time.calibration import read_calibration
from tests.commands.accept.test_accept import plant

STAGE = {stage.number: stage for stage in STAGES}


def run(tmp_path: Path, number: int, seconds: float = 400.0) -> StageResult:
    write_settings(tmp_path, Settings("cpu", 2))
    return runner.run_stage(tmp_path, STAGE[number], seconds)


def accepted(tmp_path: Path, recipe: Path | None = None) -> dict[str, dict[str, Any]]:
    """Accept a CPU; return the results of the stages by name, all of which passed."""
    minutes = 240.0  # which no stage takes: limits of time are tested in tests/commands/accept/test_accept.py
    options = command.AcceptOptions(device="cpu", out=tmp_path, minutes=minutes)
    assert command.accept(recipe, [], options) == 0
    (results,) = tmp_path.glob("*/results.json")
    entries = {entry["name"]: entry for entry in json.loads(results.read_text())}
    assert [entry["reason"] for entry in entries.values() if entry["verdict"] != "PASS"] == []
    return entries


def names(stage: dict[str, Any], verdict: str = "PASS") -> set[str]:
    return {check["name"] for check in stage["checks"] if check["verdict"] == verdict}


def look_at(stages: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Check that each stage but stage 6 ran a check of its topic."""
    assert all(len(names(stages[name])) > 15 for name in ("kernels", "model parity", "collectives"))
    parity = " ".join(names(stages["model parity"]))
    for layout in ("dense TP2", "dense CP2", "moe EP2", "moe TP2ETP2", "mla PP2", "vl TP2", "mla 1 float32 recompute"):
        assert layout in parity, layout
    resumed = {name.split()[0] for name in names(stages["model parity"]) if "resumed" in name}
    assert resumed == {"dense", "moe", "mla", "vl"}
    assert "dense: log-probs against the trainer" in names(stages["engine"])
    ways = {name.split(": ")[1] for name in names(stages["weight_sync"]) if "log-probs after" in name}
    assert {"sharded by auto", "sharded by collective", "full by auto", "full by collective"} <= ways
    assert "dense: the engine names the dead rank" in names(stages["weight_sync"])
    assert all(
        check["cause"] for stage in stages.values() for check in stage["checks"] if check["verdict"] == "NOT RUN"
    )
    (calibration,) = tmp_path.glob("*/7-speed/calibration.yaml")
    assert read_calibration(calibration).device == "CPU"


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(1800)
def test_all_stages(tmp_path):
    """All stages of `megarl accept` on a CPU: two minutes on two cores, mostly imports of its processes."""
    stages = accepted(tmp_path)
    assert list(stages) == [stage.name for stage in STAGES]
    look_at(stages, tmp_path)
    steps = names(stages["rl step"])
    assert {"colocated: importance ratio of the first update, less 1", "resumed, one step off: steps"} <= steps
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert {"verdict.md", "6-rl_step/runs/colocated/profile/step_2/rank0.json.gz"} <= packed


@pytest.mark.slow
@pytest.mark.stack
def test_late_rank_is_named_across_processes(tmp_path, monkeypatch):
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
        (5, "engine_probe", "old_weights", "the engine's weights differ from the trainers'", 400),
    ],
)
def test_fault_is_named_across_processes(tmp_path, monkeypatch, stage, module, fault, words, seconds):
    plant(monkeypatch, f"megarl.commands.accept.{module}", f"faults_of_processes:{fault}")
    result = run(tmp_path, stage, seconds)
    assert result.verdict == "FAIL" and words in result.reason, result.reason


@pytest.mark.stack
@pytest.mark.slow
def test_corrupted_bucket_is_named(tmp_path, monkeypatch):
    plant(monkeypatch, "megarl.weight_sync.fingerprint", "faults_of_processes:corrupted_bucket")
    result = run(tmp_path, 5)
    assert result.verdict == "FAIL" and "sharded by auto: two updates" in result.reason, result.reason
    assert "got other bytes than trainer" in result.reason, result.reason


@pytest.mark.stack
@pytest.mark.slow
def test_other_transports_run_if_memory_cannot_be_mapped(tmp_path, monkeypatch):
    plant(monkeypatch, "megarl.platform.cpu", "faults_of_processes:unmappable_memory")
    result = run(tmp_path, 5)
    assert result.verdict == "PASS", result.reason
    (left_out,) = [check for check in result.checks if check.name == "dense: sharded by ipc"]
    assert left_out.verdict == "NOT RUN" and "pidfd_getfd" in left_out.cause, left_out
    assert any(check.name.startswith("dense: full by collective") for check in result.checks)


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_stages_with_a_recipe(tmp_path):
    """A recipe with engine groups: the doctor's checks, a group in stage 4, the tiny copy in stage 6."""
    stages = accepted(tmp_path, Path(__file__).parents[3] / "recipes" / "grpo_deepseek_v3.yaml")
    assert "doctor: recipe: settings" in names(stages["environment"])
    assert "doctor: recipe: model" in names(stages["environment"], "NOT RUN"), "its files are not here"
    for number in range(2):
        assert f"a group of engines: log-probs of engine {number} against the trainer" in names(stages["engine"])
    assert "tiny copy of the recipe: exit status" in names(stages["rl step"])


def test_every_stage_has_its_module():
    for stage in STAGES:
        assert importlib.util.find_spec(f"megarl.commands.accept.stages.{stage.name.replace(' ', '_')}"), stage.name
    assert [stage.number for stage in STAGES] == list(range(8))


@pytest.mark.stack
@pytest.mark.slow
def test_recipe_with_few_layers_trains(tmp_path):
    """Stage 6 on two CPU processes instead of devices: the tiny copy of a recipe for 16 trainers."""
    source = make_tiny_model("qwen3_moe", tmp_path / "source", 0, num_hidden_layers=6, max_position_embeddings=1280)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{path: {source}, dtype: float32}}\ncluster: {{trainers: 16, device: npu, placement: colocated}}\n"
        "data: {train_files: [data/gsm8k/train.parquet], prompts_per_step: 64}\nreward: {function: gsm8k}\n"
        "rollout: {engines: 8, tensor_parallel: 2, max_response_length: 32, engine_args: {max_num_seqs: 16, "
        "kv_cache_memory_bytes: 67108864}}\n"
        "megatron: {tensor_parallel: 2, expert_parallel: 8}\nactor: {mini_batches: 4}\n"
    )
    folder = tmp_path / "cut"
    folder.mkdir()
    tiny = cut.make_cut(recipe, [], folder, "cpu", 2)
    assert tiny.layout == "TP2 EP2 on 2 trainers (the recipe: 16), 1 engines of TP2, 2 layers"
    context = StageContext(Settings("cpu", 2), tmp_path, tmp_path, 1e9)
    lines = rl_step._train(context, "few layers", tiny.path, tiny.recipe.train.steps, compares=False)
    assert [check.line() for check in context.checks if check.verdict == "FAIL"] == []
    assert len(lines) == 2 and list((folder / "runs" / "cut" / "checkpoints").iterdir())


@pytest.mark.stack
@pytest.mark.slow
def test_collectives_over_ray(tmp_path):
    """Ray places the ranks of two nodes, here both on this machine."""
    context = StageContext(Settings("cpu", 1, nodes=2), tmp_path, tmp_path, 1e9)
    collectives.run(context)
    assert not [check for check in context.checks if check.verdict == "FAIL"] and len(context.checks) > 10
