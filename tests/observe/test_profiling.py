"""Traces of trainers, and deterministic kernels: files of a run, and refused settings."""

from __future__ import annotations

import contextlib
import gzip
import json
import types
from concurrent.futures import Future
from pathlib import Path

import pytest

from megarl import load_recipe, platform
from megarl.commands.plan.preflight import check_run
from megarl.engines.base import EngineTraces
from megarl.engines.vllm.args import _profiler_config
from megarl.errors import RecipeError
from megarl.observe.profiling import Profiling
from megarl.platform.cpu import CPUPlatform
from megarl.platform.kinds import kind_of
from megarl.platform.tracing import TraceOptions
from megarl.preflight.environment import environment_notices
from megarl.preflight.findings import Survey
from megarl.preflight.recipe.observe import check_traces
from megarl.recipe.observe import traces_notice
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer import worker
from tests.support import stack
from tests.support.training_runs import settings

SFT = stack.ROOT / "recipes" / "tiny" / "sft.yaml"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("observe.profile_steps=[2,31]", r"go from 1 to 30, and 31 is out of range"),
        ("observe.profile_steps=[0]", r"0 is out of range"),
        ("observe.profile_ranks=[2]", r"\(cluster\.trainers\) go from 0 to 1, and 2 is out of range"),
        ("observe.profile_ranks=[]", "nothing would be traced"),
        ("observe.profile_engines=[0]", "train.source=sft has no engines"),
        ("observe.trackers=[wand]", "unknown tracker 'wand'"),
    ],
)
def test_nonexistent_steps_and_ranks_are_refused(setting: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(SFT, ["observe.profile_steps=[2]", setting])


GRPO = stack.ROOT / "recipes" / "tiny" / "grpo.yaml"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.device=npu", "observe.profile_level=level3"], "'level3' is unknown: .* level_none, level0"),
        (["cluster.device=npu", "observe.profile_metrics=L2Cache"], "only at level1 and level2"),
        (["cluster.device=npu", "observe.profile_level=level_none"], "profile_mstx=true"),
        (["cluster.device=npu", "observe.profile_export=json"], "text, db"),
        (["cluster.device=npu", "observe.profile_contents=[shapes]"], "add cpu or device"),
        (["cluster.device=cuda", "observe.profile_level=level1"], "profiler of GPUs has none"),
        (["cluster.device=cuda", "observe.profile_contents=[cpu,modules]"], "'modules' is unknown"),
        (["cluster.device=cuda", "observe.profile_mstx=true"], "no such setting"),
        (["cluster.device=cpu", "observe.profile_analysis=false"], "no such setting"),
        (["cluster.device=cpu", "observe.profile_contents=[device]"], "'device' is unknown"),
        (["observe.profile_engines=[9]"], r"engines \(rollout\.engines\) go from 0"),
        (["observe.profile_engines=[0]", "observe.profile_steps=[]"], "no step would be traced"),
    ],
)
def test_settings_that_the_profiler_lacks_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(GRPO, ["observe.profile_steps=[2]", *overrides])


def test_settings_of_the_devices_profiler_are_accepted() -> None:
    overrides = ["observe.profile_steps=[2]", "observe.profile_ranks=[]", "observe.profile_engines=[0]"]
    npu = ["observe.profile_level=level2", "observe.profile_metrics=MemoryUB", "observe.profile_mstx=true"]
    npu += ["observe.profile_export=db", "observe.profile_analysis=false", "observe.profile_contents=[device,stack]"]
    load_recipe(GRPO, ["cluster.device=npu", *overrides, *npu])
    recipe = load_recipe(GRPO, ["cluster.device=auto", *overrides, *npu])
    check_traces(recipe.observe, kind_of("npu"))
    with pytest.raises(RecipeError, match="of CPU cores"):
        check_traces(recipe.observe, kind_of("cpu"))  # once auto has become a CPU


def test_the_contents_reach_torchs_profiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.profiler as profiler

    arguments: dict[str, object] = {}
    monkeypatch.setattr(profiler, "profile", lambda **settings: arguments.update(settings))
    CPUPlatform().profiler(tmp_path, "rank0", TraceOptions(("cpu", "memory", "stack")))
    assert arguments["activities"] == [profiler.ProfilerActivity.CPU]
    named = ("record_shapes", "profile_memory", "with_stack")
    assert [arguments[name] for name in named] == [False, True, True]
    CPUPlatform().profiler(tmp_path, "rank0", TraceOptions())
    assert [arguments[name] for name in named] == [True, False, False]


def test_engines_get_vllms_profiler_config() -> None:
    """Names that this vLLM's ProfilerConfig has, with a folder; none where no engine is traced."""
    from vllm.config import ProfilerConfig

    config = _profiler_config(EngineTraces("/runs/a/profile/engine0", TraceOptions(("cpu", "memory", "modules"))))
    config_object = ProfilerConfig(**config)
    assert config_object.torch_profiler_dir == "/runs/a/profile/engine0" and config_object.profiler == "torch"
    assert (
        config_object.torch_profiler_with_memory
        and config_object.torch_profiler_with_stack
        and not config_object.torch_profiler_record_shapes
    )


class _Service:
    """An engine's process that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def call(self, method: str, *args: str) -> Future[None]:
        self.calls.append(" ".join([self.name, method, *args]))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_traces_of_async_engines_have_a_notice_before_the_start() -> None:
    """`train` and `plan` explain traces of engines that sample ahead; other engines need no explanation."""
    recipe = load_recipe(GRPO, ["cluster.device=cpu", "observe.profile_steps=[2]", "observe.profile_engines=[0]"])
    assert traces_notice(recipe) is None
    recipe.rollout.max_staleness = 2
    notices = [notice for notice in environment_notices(recipe, CPUPlatform()) if "profile_engines" in notice]
    assert notices == [traces_notice(recipe)] and "sample up to 3 steps at a time" in notices[0]
    result = Survey(recipe)
    check_run(recipe, result)
    assert notices[0] in result.texts("notice")
    recipe.observe.profile_engines = []
    assert traces_notice(recipe) is None


def test_engines_are_traced_only_in_the_chosen_steps(tmp_path: Path) -> None:
    recorded: list[str] = []
    recipe = load_recipe(GRPO, ["observe.profile_steps=[2]", "observe.profile_ranks=[]", "observe.profile_engines=[0]"])
    log = types.SimpleNamespace(notice=recorded.append, phase=lambda name: contextlib.nullcontext())
    services = [EngineHandle(_Service(f"engine{number}", recorded)) for number in range(2)]  # type: ignore[arg-type]
    profiling = Profiling(recipe.observe, None, services, log, tmp_path, 1.0, lambda: None, "engines are fixed")  # type: ignore[arg-type]
    for step in (1, 2, 3):
        profiling.before_sampling(step)
        recorded.append(f"sample {step}")
        profiling.after_sampling(step)
    *calls, notice, last = recorded
    assert calls == ["sample 1", "engine0 start_profile step_2", "sample 2", "engine0 stop_profile"]
    assert "engines are fixed" in notice and last == "sample 3"


def test_discrete_profiling_writes_one_trace_per_phase(tmp_path: Path) -> None:
    """`traced` calls write under their phase's name while profiling is on, and only on the ranks that were named."""
    recipe = load_recipe(GRPO, ["observe.profile_steps=[2]", "observe.profile_discrete=true"])
    profiles: list[str] = []

    class Phases(worker.Worker):
        def __init__(self, rank: int) -> None:
            self.recipe, self.rank = recipe, rank
            self.profiler, self.profile_folder = None, None
            self.platform = types.SimpleNamespace(profiler=self._profiler)

        def _profiler(self, folder: Path, name: str, options: TraceOptions) -> object:
            where = f"{folder.relative_to(tmp_path)}/{name}"
            return types.SimpleNamespace(
                start=lambda: profiles.append(f"+{where}"), stop=lambda: profiles.append(f"-{where}")
            )

        @worker.traced("update_actor")
        def update(self, value: int) -> int:
            return value + 1

    first, other = Phases(0), Phases(1)
    assert first.update(1) == 2 and profiles == []
    for each in (first, other):
        each.start_profile(str(tmp_path / "step_2"), [0])
        assert each.update(2) == 3
        each.stop_profile()
        assert each.update(3) == 4
    assert profiles == ["+step_2/update_actor/rank0", "-step_2/update_actor/rank0"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_trainer_is_deterministic_if_the_recipe_sets_it(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Stop(Exception):
        pass

    def set_device(_: int) -> None:
        raise Stop

    recipe = load_recipe(SFT, [f"train.deterministic={str(deterministic).lower()}"])
    stopping = types.SimpleNamespace(prepare=lambda: None, set_device=set_device)
    monkeypatch.setattr(platform, "select", lambda device: stopping)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(Stop):
            worker.Worker(recipe, 1)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_step_is_traced(quickstart_data: Path, tmp_path: Path) -> None:
    """The selected rank alone is traced, forward and backward; the run continues with deterministic kernels."""
    overrides = [f"model.path={quickstart_data}/model", f"data.train_files=[{quickstart_data}/data/sft.parquet]"]
    overrides += [
        f"runs_dir={tmp_path}",
        "name=traced",
        "train.steps=3",
        "train.save_at_end=false",
        "data.eval_files=[]",
    ]
    overrides += [
        "evaluation.at_start=false",
        "evaluation.every=0",
        "evaluation.at_end=false",
        "train.deterministic=true",
    ]
    overrides += ["observe.profile_steps=[2]", "observe.profile_ranks=[1]"]
    done = stack.run("train", str(SFT), *overrides, torchrun=2)
    assert done.returncode == 0, done.stderr
    traces = [path.relative_to(tmp_path) for path in tmp_path.glob("traced/profile/**/*") if path.is_file()]
    assert traces == [Path("traced/profile/step_2/rank1.json.gz")]
    events = json.loads(gzip.decompress((tmp_path / traces[0]).read_bytes()))["traceEvents"]
    named = [event.get("name", "") for event in events]
    assert "aten::mm" in named and any("Backward" in name for name in named), "no backward pass in it"
    lines = stack.metrics(tmp_path / "traced")
    assert len(lines) == 3 and [("timing_s/profile" in line) for line in lines] == [False, True, False]


@pytest.mark.slow
@pytest.mark.stack
def test_engines_and_phases_are_traced_in_a_run(quickstart_data: Path, tmp_path: Path) -> None:
    """Real trainers and a real engine: a trace of the engine while it samples, and one for each phase of the trainer."""
    small = ["train.steps=2", "cluster.trainers=1", "megatron.expert_parallel=1", "train.save_every=0"]
    small += ["train.save_at_end=false", "algorithm.dynamic_sampling.enabled=false", "observe.profile_discrete=true"]
    small += ["evaluation.at_start=false", "evaluation.at_end=false", "observe.profile_steps=[2]"]
    small += ["observe.profile_engines=[0]", "observe.profile_contents=[cpu,memory]"]
    done = stack.run("train", "recipes/quickstart.yaml", *settings(quickstart_data, tmp_path, "traced", *small))
    assert done.returncode == 0, done.stderr + done.stdout
    folder = tmp_path / "traced" / "profile"
    (engine,) = (folder / "engine0").glob("*.json*")
    phases = {path.parent.name for path in (folder / "step_2").rglob("rank0.json.gz")}
    assert "update_actor" in phases and "step_2" not in phases, phases
    names = []
    for path in (engine, folder / "step_2" / "update_actor" / "rank0.json.gz"):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(text)["traceEvents"]
        names.append({event.get("name", "") for event in events})
    assert any("Backward" in name for name in names[1]) and not any("Backward" in name for name in names[0])
    assert any(name.startswith("aten::") for name in names[0]), "the engine's trace holds no operator"
    notices = (tmp_path / "traced" / "notices.jsonl").read_text()
    assert "engines [0] were traced" in notices
